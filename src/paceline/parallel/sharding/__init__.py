"""Sharding of parameters, gradients and optimizer state: ZeRO and `fully_shard`."""
