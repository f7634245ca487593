"""Checkpoint files on disk, without torch: manifest, two-phase commit, safetensors, resharding reads."""
