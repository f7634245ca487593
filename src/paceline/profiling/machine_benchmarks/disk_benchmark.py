"""Measure the write and read rates of a folder's disk, on all ranks at the same time."""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import fmean

from paceline.comm.process_group import World
from paceline.filesystem.atomic_files import free_bytes
from paceline.planner.hardware.benchmark_results import Disk

_CHUNK_BYTES = 8 * 2**20
_MAX_CHUNKS = 16
# All ranks together write at most 1/8 of the free space. Each rank writes at least one chunk, even if that is more.
_FREE_SPACE_DIVISOR = 8


def measure_disk(world: World, *, folder: Path, seconds: float) -> Disk | None:
    """Return the rates of the folder's disk, averaged over the ranks, or None if a rank can't write to it.

    Every rank calls this. The file that it writes is removed.
    """
    existing_folder = _existing_parent(folder)
    max_chunks = max(
        1, min(_MAX_CHUNKS, free_bytes(existing_folder) // (_FREE_SPACE_DIVISOR * world.world_size * _CHUNK_BYTES))
    )
    file = existing_folder / f".probe-{world.rank}-{os.getpid()}"
    world.barrier()
    write = _measure_or_none(lambda: _measure_write(file, chunks=max_chunks, seconds=seconds / 2))
    world.barrier()
    read = _measure_or_none(lambda: _measure_read(file))
    with suppress(OSError):
        file.unlink(missing_ok=True)
    rates = world.gather_json([write, read])
    if any(rate is None for rank in rates for rate in rank):
        return None
    writes, reads = (fmean(column) for column in zip(*rates, strict=True))
    return Disk(folder=str(existing_folder), write_rate=writes, read_rate=reads)


def _measure_or_none(measure: Callable[[], float]) -> float | None:
    try:
        return measure()
    except OSError:
        return None


def _measure_write(file: Path, *, chunks: int, seconds: float) -> float:
    """Return the write rate in bytes per second, including the flush, over about `seconds`."""
    data, num_chunks = os.urandom(_CHUNK_BYTES), 0
    start_time = time.perf_counter()
    with file.open("wb", buffering=0) as out:
        while num_chunks < chunks and (not num_chunks or time.perf_counter() - start_time < seconds):
            out.write(data)
            os.fsync(out.fileno())
            num_chunks += 1
    return num_chunks * _CHUNK_BYTES / (time.perf_counter() - start_time)


def _measure_read(file: Path) -> float:
    """Return the read rate in bytes per second. Ask the system to drop the file from its cache first."""
    with file.open("rb", buffering=0) as source:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(source.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start_time, num_bytes = time.perf_counter(), 0
        while chunk := source.read(_CHUNK_BYTES):
            num_bytes += len(chunk)
        return num_bytes / (time.perf_counter() - start_time)


def _existing_parent(folder: Path) -> Path:
    """Return the folder itself if it exists, else its nearest existing parent, as an absolute path."""
    while not folder.is_dir():
        folder = folder.parent
    return folder.absolute()
