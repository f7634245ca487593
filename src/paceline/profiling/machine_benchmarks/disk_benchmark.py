"""Disk benchmark: write and read rates of a folder's disk, with all ranks at the same time."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from paceline.comm.process_group import World
from paceline.filesystem.atomic_files import free_bytes
from paceline.planner.hardware.benchmark_results import Disk

_CHUNK = 8 * 2**20
_MOST_CHUNKS = 16
_LEFT_FREE = 8  # at most this fraction (1/8) of the free space is written


def measure_disk(world: World, *, folder: Path, seconds: float) -> Disk | None:
    """Return the disk rates, or None if a rank can't write there. No file is left behind. Every rank calls this."""
    place = _existing(folder)
    most = max(1, min(_MOST_CHUNKS, free_bytes(place) // (_LEFT_FREE * world.world_size * _CHUNK)))
    file = place / f".probe-{world.rank}-{os.getpid()}"
    world.barrier()
    write = _tried(lambda: _write(file, chunks=most, seconds=seconds / 2))
    world.barrier()
    read = _tried(lambda: _read(file))
    with suppress(OSError):
        file.unlink(missing_ok=True)
    found = world.gather_json([write, read])
    if any(rate is None for rank in found for rate in rank):
        return None
    writes, reads = (fmean(column) for column in zip(*found, strict=True))
    return Disk(folder=str(place), write_rate=writes, read_rate=reads)


def _tried(measure: Callable[[], float]) -> float | None:
    try:
        return measure()
    except OSError:
        return None


def _write(file: Path, *, chunks: int, seconds: float) -> float:
    """Return the write rate in bytes per second, including the flush, over about `seconds`."""
    data, number = os.urandom(_CHUNK), 0
    began = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        while number < chunks and (not number or time.perf_counter() - began < seconds):
            out.write(data)
            os.fsync(out.fileno())
            number += 1
    return number * _CHUNK / (time.perf_counter() - began)


def _read(file: Path) -> float:
    """Return the read rate in bytes per second, from the disk if the system drops its cache of the file."""
    with file.open("rb", buffering=0) as source:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began, num_bytes = time.perf_counter(), 0
        while found := source.read(_CHUNK):
            num_bytes += len(found)
        return num_bytes / (time.perf_counter() - began)


def _existing(folder: Path) -> Path:
    """Return the nearest existing parent folder."""
    while not folder.is_dir():
        folder = folder.parent
    return folder.absolute()
