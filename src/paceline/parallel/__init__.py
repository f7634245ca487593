"""Parallelism of a model: data parallel, sharded, tensor, context, expert and pipeline parallel, and checkpointing."""
