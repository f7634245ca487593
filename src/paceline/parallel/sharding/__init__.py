"""Parameters, gradients and optimizer state in shares: ZeRO and `fully_shard`."""
