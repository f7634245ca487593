"""Evaluation, metrics over all ranks, and early stopping."""
