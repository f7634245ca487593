"""Checkpoints that can't lie: a digest for everything, written aside, flushed, renamed, then `latest`.

A folder `step-00000100` exists only once it is whole. Its manifest names every file and tensor with a digest,
and carries its own, so that no flipped bit loads silently.
"""

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, SaveError
from paceline.spec.words import size
from paceline.store.disk import free_bytes, sync_folder, write_text
from paceline.store.full import written
from paceline.store.tensors import (
    TensorBytes,
    TensorEntry,
    digest,
    header_digest,
    read_tensors,
    write_tensors,
)

FORMAT = "paceline-checkpoint-1"
MANIFEST = "manifest.json"
LATEST, BEST = "latest", "best"
_STEP = re.compile(r"step-(\d{8,})")
_ASIDE = ".saving-"
_SPARE_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A checkpoint whose every byte was compared with its digest."""

    path: Path
    step: int
    state: dict[str, Any]
    files: dict[str, dict[str, TensorBytes]]

    def is_in(self, folder: Path) -> bool:
        """Whether it is one of a run's own checkpoints, and not what a branch begins from."""
        return self.path.resolve().parent == folder.resolve()


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A checkpoint that can't be used, and why."""

    path: Path
    reason: str


def step_name(step: int) -> str:
    """The folder of a step."""
    return f"step-{step:08d}"


def save(folder: Path, *, step: int, files: Mapping[str, Sequence[TensorBytes]], state: Mapping[str, Any]) -> Path:
    """Write the checkpoint of `step` into `folder` and make it the latest.

    Raises:
        SaveError: no space or no permission; older checkpoints are untouched.
    """
    aside = folder / f"{_ASIDE}{step_name(step)}-{os.getpid()}"
    with written(f"step {step}", folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            remove_leftovers(folder)
            _check_space(folder, files)
            aside.mkdir()
            write_part(aside, files=files, state=state, step=step)
            return commit(folder, aside, step=step)
        except OSError:
            shutil.rmtree(aside, ignore_errors=True)
            raise


def write_part(aside: Path, *, files: Mapping[str, Sequence[TensorBytes]], state: Mapping[str, Any], step: int) -> None:
    """Write tensors and manifest into a folder that nobody reads yet, and flush them."""
    listed = {}
    for name, tensors in files.items():
        entries = write_tensors(aside / name, list(tensors))
        listed[name] = {
            "header": header_digest(aside / name),
            "bytes": (aside / name).stat().st_size,
            "tensors": [entry.as_json() for entry in entries],
        }
    body = {"format": FORMAT, "step": step, "state": state, "files": listed}
    text = json.dumps(body, separators=(",", ":"))
    write_text(aside / MANIFEST, json.dumps({"digest": digest(text.encode()), "body": text}))


def commit(folder: Path, aside: Path, *, step: int) -> Path:
    """Make a written folder the checkpoint of its step, then the latest."""
    final = folder / step_name(step)
    sync_folder(aside)
    if final.exists():
        old = folder / f"{_ASIDE}old-{final.name}-{os.getpid()}"
        final.rename(old)
        aside.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        aside.rename(final)
    sync_folder(folder)
    write_text(folder / LATEST, final.name + "\n")
    return final


def load(path: Path) -> Loaded:
    """Read a checkpoint, comparing every byte with its digest.

    Raises:
        CheckpointError: anything is missing, cut off, changed or foreign.
    """
    body = read_manifest(path)
    files: dict[str, dict[str, TensorBytes]] = {}
    for name, listed in body["files"].items():
        entries = _checked_file(path, name, listed)
        files[name] = {tensor.name: tensor for tensor in read_tensors(path / name, entries)}
    return Loaded(path=path, step=int(body["step"]), state=body["state"], files=files)


def verify(path: Path) -> None:
    """Read it as `load` does, keeping nothing in memory.

    Raises:
        CheckpointError: as `load`.
    """
    body = read_manifest(path)
    for name, listed in body["files"].items():
        for _ in read_tensors(path / name, _checked_file(path, name, listed)):
            pass


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest's body, once its digest was found right, and its step the one that the folder's name says."""
    try:
        outer = json.loads((path / MANIFEST).read_bytes())
        text, expected = outer["body"], outer["digest"]
        if digest(text.encode()) != expected or set(outer) != {"digest", "body"}:
            raise CheckpointError(f"the manifest of {path.name} is not what was written.", where=str(path))
        body: dict[str, Any] = json.loads(text)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.name} has no {MANIFEST}.", where=str(path), cause="it is no checkpoint of Paceline's"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the manifest of {path.name} is damaged.", where=str(path)) from error
    if body.get("format") != FORMAT:
        raise CheckpointError(
            f"{path.name} has the format {body.get('format')!r}, this version reads {FORMAT!r}.",
            where=str(path),
        )
    if step_of(path) not in (body["step"], -1):
        raise CheckpointError(
            f"{path.name} holds step {body['step']}: the folder's name is not its step.",
            where=str(path),
            cause="it was renamed, or copied to another name",
            hint=f"mv {path.name} {step_name(body['step'])}",
        )
    return body


def newest_good(folder: Path) -> tuple[Path | None, list[Refused]]:
    """The newest checkpoint that is whole, and the newer ones that are not."""
    _put_back(folder)
    refused = [
        Refused(path=path, reason="the save was interrupted")
        for path in sorted(folder.glob(f"{_ASIDE}step-*"))
        if not _is_saving(path)
    ]
    for path in reversed(all_steps(folder)):
        try:
            verify(path)
        except CheckpointError as error:
            refused.append(Refused(path=path, reason=error.what))
        else:
            return path, refused
    gone = folder / _said(folder, LATEST)
    if not refused and gone != folder and not gone.exists():
        refused.append(Refused(path=gone, reason="latest names it, and it is gone"))
    return None, refused


def was_saved(folder: Path) -> bool:
    """Whether a run has saved here, or was about to."""
    return (folder / LATEST).exists() or any(folder.glob("step-*")) or any(folder.glob(f"{_ASIDE}*"))


def _put_back(folder: Path) -> None:
    """A kill between the two renames of a step that is saved again leaves the older save aside: it is good still."""
    for path in folder.glob(f"{_ASIDE}old-step-*"):
        final = folder / path.name.removeprefix(f"{_ASIDE}old-").rpartition("-")[0]
        if not final.exists() and not _is_saving(path):
            with suppress(OSError):
                path.rename(final)


def all_steps(folder: Path) -> list[Path]:
    """Every checkpoint folder, oldest first."""
    found = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint folder's name."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1


def mark_best(folder: Path, path: Path) -> None:
    """Remember which checkpoint was best."""
    write_text(folder / BEST, path.name + "\n")


def marked(folder: Path, mark: str) -> Path | None:
    """What `latest` or `best` points to, if that is a checkpoint here."""
    path = folder / _said(folder, mark)
    return path if path != folder and path.is_dir() else None


def _said(folder: Path, mark: str) -> str:
    """The step that a mark names; empty where it can't be read."""
    try:
        name = (folder / mark).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    return name if _STEP.fullmatch(name) else ""


def prune(folder: Path, *, keep: int) -> list[Path]:
    """Remove all but the last `keep` and the best, and never the only good one; returns what went."""
    steps = all_steps(folder)
    kept = set(steps[-max(keep, 1) :]) | {marked(folder, BEST), marked(folder, LATEST)}
    doomed = [path for path in steps if path not in kept]
    if not doomed or not any(_is_good(path) for path in sorted((p for p in kept if p), reverse=True)):
        return []
    for path in doomed:
        gone = path.with_name(f"{_ASIDE}gone-{path.name}")
        path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)
    return doomed


def remove_leftovers(folder: Path) -> None:
    """Remove what interrupted saves of processes that are gone have left."""
    _put_back(folder)
    for path in folder.glob(f"{_ASIDE}*"):
        if not _is_saving(path):
            shutil.rmtree(path, ignore_errors=True)


def _is_saving(path: Path) -> bool:
    owner = path.name.rpartition("-")[2]
    return owner.isdigit() and int(owner) != os.getpid() and Path(f"/proc/{owner}").exists()


def _is_good(path: Path) -> bool:
    try:
        verify(path)
    except CheckpointError:
        return False
    return True


def _check_space(folder: Path, files: Mapping[str, Sequence[TensorBytes]]) -> None:
    needed = sum(t.data.nbytes for tensors in files.values() for t in tensors) + _SPARE_BYTES
    free = free_bytes(folder)
    if free < needed:
        raise SaveError(
            f"a checkpoint needs {size(needed)}, {size(free)} are free.",
            where=str(folder),
            hint="free some space, or --run-dir on another disk; older checkpoints are untouched",
        )


def _checked_file(path: Path, name: str, listed: Mapping[str, Any]) -> list[TensorEntry]:
    file = path / name
    if Path(name).name != name:
        raise CheckpointError(f"the manifest of {path.name} names a file outside it: {name}.", where=str(path))
    if not file.is_file():
        raise CheckpointError(f"{name} is missing from {path.name}.", where=str(path))
    if file.stat().st_size != listed["bytes"]:
        raise CheckpointError(
            f"{name} has {file.stat().st_size} bytes, {listed['bytes']} were written.", where=str(file)
        )
    if header_digest(file) != listed["header"]:
        raise CheckpointError(f"the header of {name} is not what was written.", where=str(file))
    try:
        return [TensorEntry.from_json(entry) for entry in listed["tensors"]]
    except (KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"the manifest of {path.name} is damaged: {error}.", where=str(path)) from error
