"""Gradients that cross in fewer bytes."""
