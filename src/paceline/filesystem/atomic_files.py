"""Atomic writes that survive a crash (temporary file, flush, rename), and safe reads of untrusted files."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import UsageError

MAX_BYTES = 64 << 20
_MAX_DIGITS = 300
_DAMAGE_ERRNOS = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EISDIR, errno.ENXIO)


def folder_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder in bytes, without subfolders."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def free_bytes(folder: Path) -> int:
    """Return the free space on the disk of `folder`, which may not exist yet."""
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str, *, private: bool = False) -> None:
    """Replace a file atomically: a reader sees the old text or the new. Only the owner can read a `private` file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        flags, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666
        with os.fdopen(open_no_follow(temporary, flags, mode), "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def report_write_errors(path: Path) -> Iterator[None]:
    """Convert a disk error in the block into a usage error that names the path.

    Raises:
        UsageError: the path can't be written, or its disk is full.
    """
    try:
        yield
    except OSError as error:
        hint = "another path, on a writable disk with free space"
        raise UsageError(f"{path} can't be written: {error.strerror}.", hint=hint) from None


def check_writable(file: Path) -> None:
    """Check, before a run, that an output file can be written at the end of the run.

    Raises:
        UsageError: the file can't be written.
    """
    if file.is_dir():
        raise UsageError(f"{file} is a folder, but a file must be written there.", hint=str(file / "page.html"))
    with report_write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        probe = file.with_name(f".{file.name}.{os.getpid()}.try")
        probe.touch()
        probe.unlink()


def write_json(path: Path, value: Any, *, private: bool = False) -> None:
    """Replace a JSON file atomically. Only the owner can read a `private` file."""
    write_text(path, json.dumps(value, indent=1, sort_keys=False) + "\n", private=private)


def open_regular(path: Path) -> int:
    """Open a file for reading, without waiting for a pipe's writer or a device.

    Raises:
        OSError: it can't be opened.
        ValueError: it is not a regular file.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{path.name} is not a regular file")
    return handle


def read_regular(path: Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content of a regular file of bounded size.

    Raises:
        OSError: it can't be read.
        ValueError: it is not a regular file, or it is larger than `max_bytes`.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise ValueError(f"{path.name} has more than {max_bytes} bytes")
        return file.read(size)  # a known size: memory is allocated once


def read_json(path: Path, *, max_bytes: int = MAX_BYTES) -> Any:
    """Read an untrusted JSON file.

    Raises:
        OSError: it can't be read.
        ValueError: it is not a regular file, too large, or not JSON.
    """
    return parse_json(read_regular(path, max_bytes=max_bytes))


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, is nested too deep, or does not fit into memory.
    """
    try:
        return json.loads(text, parse_int=_parse_int)
    except (RecursionError, MemoryError) as error:
        raise ValueError(f"nested too deep, or too large: {type(error).__name__}") from None


def _parse_int(digits: str) -> float:
    """Return an integer, or a float if it has more digits than any number that Paceline writes."""
    return int(digits) if len(digits) <= _MAX_DIGITS else float(digits)


def is_damage(error: OSError) -> bool:
    """Return True if the error shows that a file is missing or not regular. Otherwise, the file may be intact."""
    return error.errno in _DAMAGE_ERRNOS


def open_no_follow(path: Path, flags: int, mode: int = 0o644) -> int:
    """Open a file of a run folder for writing, without following a link.

    Raises:
        OSError: it can't be opened; ELOOP if it is a link.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
