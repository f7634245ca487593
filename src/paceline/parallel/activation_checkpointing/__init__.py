"""Activation checkpointing: the activations of blocks are freed in forward and recomputed in backward."""
