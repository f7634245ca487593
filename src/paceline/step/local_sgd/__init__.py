"""Local SGD and DiLoCo: sites that step alone and meet after a number of steps."""
