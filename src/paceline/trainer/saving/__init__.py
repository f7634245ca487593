"""Saving and resuming: checkpoints on disk and in memory, and the state that update rules add to them."""
