"""Initialization: start values of one plain build, or of random streams keyed by name.

Each rank gets its own parts, and no more.
"""
