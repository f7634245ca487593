"""Simulate the events of a step, and forecast a long run with failures (goodput)."""
