"""Access to a user's module: blocks, parameters, buckets, hooks, and where its tensors are stored."""
