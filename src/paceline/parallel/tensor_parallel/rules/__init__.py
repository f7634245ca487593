"""Sharding propagation rules of the torch functions."""
