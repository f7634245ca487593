"""Time layouts and schedules on this machine, and cache the results."""
