"""From a layout and a cluster to an execution plan; which combinations cannot work."""
