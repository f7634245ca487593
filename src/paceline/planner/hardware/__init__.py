"""Clusters, devices and links: catalogue, benchmark results, efficiency."""
