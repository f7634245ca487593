"""Evaluation, metrics over all ranks, early stopping."""
