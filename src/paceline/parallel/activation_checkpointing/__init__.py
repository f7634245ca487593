"""Activation checkpointing: blocks whose activations are recomputed in backward."""
