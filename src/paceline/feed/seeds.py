"""Randomness in the data: each sample's own seed, whoever reads it."""

from paceline.streams import key, seed_all


def seed_sample(*, seed: int, epoch: int, index: int) -> None:
    """Seed Python, NumPy and torch for one sample of one epoch."""
    seed_all(key(seed, "sample", epoch, index))
