"""Checkpoints in memory: what a restart after a fault continues from.

Start with `memory_tier.py`.
"""
