"""Training state in checkpoints: what is saved, how ranks write it together, and how another layout reads it."""
