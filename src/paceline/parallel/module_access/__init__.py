"""Access to a user's module: blocks, parameters, buckets, hooks, and the location of its tensors."""
