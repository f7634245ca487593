"""What a model's layers cost: profile, chain of layers, balance of stages, FLOPs."""
