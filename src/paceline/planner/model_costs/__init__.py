"""Describe the cost of a model's layers: profile, chain of layers, balance of stages, FLOPs."""
