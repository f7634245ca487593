"""Sharding of parameters, gradients and optimizer state: ZeRO stages 1 to 3, stage 3 on `fully_shard`."""
