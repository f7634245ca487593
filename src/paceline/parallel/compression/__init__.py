"""Gradient compression for data-parallel replicas."""
