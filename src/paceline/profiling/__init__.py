"""Measure machines, and what models compute, hold and send."""
