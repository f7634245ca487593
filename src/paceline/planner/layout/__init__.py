"""Make execution plans from a layout and a cluster, and refuse combinations that cannot work."""
