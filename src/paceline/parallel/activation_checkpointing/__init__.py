"""Activation checkpointing: which operations are recomputed in backward."""
