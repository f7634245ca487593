"""Simulation of a step's events, and of a long run with failures (goodput)."""
