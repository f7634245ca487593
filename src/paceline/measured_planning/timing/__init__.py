"""Layouts and schedules that are timed on this machine, and the kept answers."""
