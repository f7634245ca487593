"""`ckpt ls`, `ckpt verify`, `ckpt consolidate`."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import CheckpointError, UsageError
from paceline.spec.words import did_you_mean
from paceline.store.checkpoints import (
    BEST,
    LATEST,
    all_steps,
    load,
    marked,
    newest_good,
    read_manifest,
    step_of,
    verify,
)
from paceline.store.disk import folder_bytes, sync_folder
from paceline.store.runs import find_run
from paceline.store.tensors import TensorBytes, write_tensors

WEIGHTS, AVERAGE = "model.safetensors", "ema.safetensors"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One checkpoint."""

    step: int
    path: str
    num_bytes: int
    good: bool
    reason: str
    marks: tuple[str, ...]


def ls(run: str | None = None) -> list[Row]:
    """Every checkpoint of a run, each read whole and compared with its digests."""
    folder, _ = find_run(run)
    marks = {mark: marked(folder.checkpoints, mark) for mark in (LATEST, BEST)}
    return [
        _row(path, tuple(mark for mark, at in marks.items() if at == path)) for path in all_steps(folder.checkpoints)
    ]


def verify_checkpoint(run: str | None = None) -> Row:
    """Read one checkpoint (or the newest) whole and compare it with its digests.

    Raises:
        CheckpointError: it is not what was written.
    """
    folder, checkpoint = find_run(run)
    steps = all_steps(folder.checkpoints)
    path = checkpoint or (steps[-1] if steps else None)
    if path is None:
        raise CheckpointError("the run has no checkpoint.", where=str(folder.checkpoints))
    verify(path)
    return _row(path, ())


@dataclass(frozen=True, kw_only=True)
class Consolidated:
    """What was written, from which step, and which of its weights."""

    path: str
    step: int
    weights: str


def consolidate(
    run: str | None = None, *, to: Path, best: bool = False, raw: bool = False, average: bool = False
) -> Consolidated:
    """Write a checkpoint's weights as a plain folder: `model.safetensors`, every name, no Paceline needed.

    They are those that its metric was measured on: the average, where the job has one. `raw` takes the weights in
    training instead, `average` insists on the average. `best` takes the checkpoint marked so.

    Raises:
        CheckpointError: there is no such good checkpoint or no average in it, or `to` exists.
    """
    if raw and average:
        raise UsageError("--raw and --average are different weights.", hint="one of them; the average is the default")
    folder, checkpoint = find_run(run)
    path = marked(folder.checkpoints, BEST) if best else checkpoint or newest_good(folder.checkpoints)[0]
    if path is None:
        kind = "best" if best else "good"
        raise CheckpointError(f"the run has no {kind} checkpoint.", where=str(folder.checkpoints))
    if to.exists():
        raise CheckpointError(f"{to} exists and is left alone.", hint="another --to")
    loaded = load(path)
    if average and AVERAGE not in loaded.files:
        raise CheckpointError(
            f"{path.name} holds no average.", where=str(path), cause="the job has no ema=", hint="leave --average out"
        )
    tensors = loaded.files[WEIGHTS] | ({} if raw else loaded.files.get(AVERAGE, {}))
    for alias, name in loaded.state.get("aliases", {}).items():
        source = tensors[name]
        tensors[alias] = TensorBytes(name=alias, dtype=source.dtype, shape=source.shape, data=source.data)
    aside = to.with_name(f".{to.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    write_tensors(aside / WEIGHTS, list(tensors.values()))
    given = folder.path / "consolidated" / "config.json"
    if given.exists():
        (aside / "config.json").write_text(json.dumps(json.loads(given.read_text()), indent=1))
    sync_folder(aside)
    aside.rename(to)
    kind = "the average (ema)" if AVERAGE in loaded.files and not raw else "the weights in training"
    return Consolidated(path=str(to), step=loaded.step, weights=kind)


def _row(path: Path, marks: tuple[str, ...]) -> Row:
    size = folder_bytes(path)
    try:
        read_manifest(path)
        verify(path)
    except CheckpointError as error:
        return Row(step=step_of(path), path=str(path), num_bytes=size, good=False, reason=error.what, marks=marks)
    return Row(step=step_of(path), path=str(path), num_bytes=size, good=True, reason="", marks=marks)


def unknown(word: str) -> UsageError:
    """For a word that is none of the three."""
    known = ("ls", "verify", "consolidate")
    return UsageError(
        f"ckpt does not know {word!r}.", cause=did_you_mean(word, known), hint=f"ckpt {' | '.join(known)}"
    )
