"""Writing that survives a crash: aside, flushed, renamed."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from paceline.errors import UsageError


def folder_bytes(folder: Path) -> int:
    """The bytes of all files in it, which is what a checkpoint takes."""
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def free_bytes(folder: Path) -> int:
    """Free space where `folder` is or will be."""
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


def write_text(path: Path, text: str) -> None:
    """Replace a file at once: a reader sees the old text or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def writing(place: Path) -> Iterator[None]:
    """What a disk does not take is told with the place that a user chose.

    Raises:
        UsageError: it can't be written, or is full.
    """
    try:
        yield
    except OSError as error:
        hint = "another place, on a disk that you may write and that has room"
        raise UsageError(f"{place} can't be written: {error.strerror}.", hint=hint) from None


def refuse_place(file: Path) -> None:
    """Before anything runs: whether this file could be written at its end.

    Raises:
        UsageError: it can't.
    """
    if file.is_dir():
        raise UsageError(f"{file} is a folder, and a file is to be written.", hint=str(file / "page.html"))
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        probe = file.with_name(f".{file.name}.{os.getpid()}.try")
        probe.touch()
        probe.unlink()


def write_json(path: Path, value: Any) -> None:
    """Replace a JSON file at once."""
    write_text(path, json.dumps(value, indent=1, sort_keys=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))
