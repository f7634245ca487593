"""Local SGD and DiLoCo: sites that train independently and synchronise every few steps."""
