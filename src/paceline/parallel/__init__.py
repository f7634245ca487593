"""Parallelize a model: by data, sharding, tensors, context, experts and pipeline stages, and with checkpointing."""
