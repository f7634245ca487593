"""The copy of a checkpoint from memory to disk, in calls during which the other threads of the process run."""

import errno
import os
from pathlib import Path

_CHUNK_BYTES = 16 << 20  # of one call; the thread can be interrupted between two calls


def copy_files(source: Path, staging: Path) -> None:
    """Copy the files of the checkpoint `source` into a staging folder, and flush them to disk.

    The kernel copies the bytes, so that Python's lock is free meanwhile.

    Raises:
        OSError: a file can't be written, or has another size than its source.
    """
    for file in sorted(source.iterdir()):
        _copy_file(file, staging / file.name)


def _copy_file(source: Path, target: Path) -> None:
    with source.open("rb", buffering=0) as reader, target.open("xb", buffering=0) as writer:
        num_bytes, offset = os.fstat(reader.fileno()).st_size, 0
        while offset < num_bytes:
            copied = os.sendfile(writer.fileno(), reader.fileno(), offset, min(_CHUNK_BYTES, num_bytes - offset))
            if not copied:
                break
            offset += copied
        os.fsync(writer.fileno())
        if os.fstat(writer.fileno()).st_size != num_bytes:
            raise OSError(errno.EIO, f"{offset:,} of {num_bytes:,} bytes were copied", str(target))
