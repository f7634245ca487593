"""Per-sample seeds: each sample has its own seed, independent of the process that reads it."""

from paceline.torch_internals.rng import seed_all, stream_key


def seed_sample(*, seed: int, epoch: int, index: int) -> None:
    """Seed Python, NumPy and torch for one sample of one epoch."""
    seed_all(stream_key(seed, "sample", epoch, index))
