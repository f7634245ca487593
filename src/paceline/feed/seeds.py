"""Randomness in the data: each sample's own seed, whoever reads it."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from paceline.streams import key, seed_all


def seed_sample(*, seed: int, epoch: int, index: int) -> None:
    """Seed Python, NumPy and torch for one sample of one epoch."""
    seed_all(key(seed, "sample", epoch, index))


def draws_random(read: Callable[[int], Any], *, num_samples: int) -> bool:
    """Whether reading a sample uses the global generators. Every process tries the same samples."""
    for index in {0, num_samples // 2}:
        before = _states()
        try:
            read(index)
        except Exception:  # the real read will name it
            return True
        if _states() != before:
            return True
    return False


def _states() -> tuple[Any, bytes, bytes]:
    legacy = np.random.get_state(legacy=False)
    inner: Any = legacy["state"]
    numbers = bytes(np.asarray(inner["key"]).data) + bytes([inner["pos"] & 0xFF])
    return random.getstate(), numbers, bytes(torch.get_rng_state().numpy())
