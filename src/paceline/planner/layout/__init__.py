"""Execution plans from a layout and a cluster, and checks of which combinations cannot work."""
