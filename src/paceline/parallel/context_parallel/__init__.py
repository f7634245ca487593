"""Context parallelism: a sequence sharded over the ranks of a `cp` axis, with the model's forward unchanged."""
