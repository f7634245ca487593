"""Checksums of what was read."""

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def checksum(sample: Any, start: int) -> int:
    """A running CRC of a sample's content."""
    if isinstance(sample, torch.Tensor):
        return checksum(sample.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), start)
    if isinstance(sample, np.ndarray):
        return zlib.crc32(np.ascontiguousarray(sample).tobytes(), start)
    if isinstance(sample, Mapping):
        for name in sample:
            start = checksum(sample[name], zlib.crc32(str(name).encode(), start))
        return start
    if isinstance(sample, tuple | list):
        for part in sample:
            start = checksum(part, start)
        return start
    return zlib.crc32(repr(sample).encode(), start)


def fold(total: int, number: int) -> int:
    """A running checksum with one more checksum."""
    return zlib.crc32(number.to_bytes(4, "little"), total)
