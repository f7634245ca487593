"""Diagnostics of memory, non-finite numbers, differing replicas and forecasts."""
