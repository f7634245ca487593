"""Timing of layouts and schedules on this machine, and a cache of the results."""
