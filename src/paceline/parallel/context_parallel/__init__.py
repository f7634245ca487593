"""A sequence over the ranks of a `cp` axis, the model's forward as it is."""
