"""What is said of memory, non-finite numbers, replicas that differ, and forecasts."""
