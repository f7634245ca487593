"""The `ckpt` verb (ls, verify, diff, consolidate, prune): works on checkpoints without torch, one tensor at a time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from paceline.checkpoint.files import checkpoint_folder as checkpoints
from paceline.checkpoint.files.checkpoint_folder import (
    BEST,
    LATEST,
    OpenCheckpoint,
    check_checkpoint,
    is_mark_broken,
    list_checkpoints,
    open_checkpoint,
    parse_step,
    resolve_mark,
)
from paceline.checkpoint.files.hf_folder import WEIGHTS_RECORD, check_consolidated, write_model_folder
from paceline.checkpoint.files.resharding_reader import StoredTensors, check_digests
from paceline.checkpoint.files.safetensors_io import LazyTensor, Shape
from paceline.console.formatting import did_you_mean, first_names, format_size, plural
from paceline.errors import CheckpointError, MachineError, UsageError
from paceline.filesystem.atomic_files import folder_bytes, read_json
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.filesystem.run_lock import refuse_links
from paceline.run_folder.run_folder import find_run, newest_checkpoint

WEIGHTS, AVERAGE = "model.safetensors", "ema.safetensors"
CONSOLIDATED = "consolidated"


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """One row of `ckpt ls`: a checkpoint, its marks (latest, best), and the reason if it is not good."""

    step: int
    path: str
    num_bytes: int
    good: bool
    reason: str
    marks: tuple[str, ...]


def describe_checkpoints(run: str | None = None) -> list[CheckpointRow]:
    """List every checkpoint of a run; each is read completely and compared with its digests."""
    folder, _ = find_run(run, only_trained=True)
    marks = {mark: resolve_mark(folder.checkpoints, mark) for mark in (LATEST, BEST)}
    return [
        _checkpoint_row(path, tuple(mark for mark, marked in marks.items() if marked == path))
        for path in list_checkpoints(folder.checkpoints)
    ]


@dataclass(frozen=True, kw_only=True)
class VerifiedCheckpoint:
    """The result of `ckpt verify`: a checkpoint whose files were read completely and match their digests."""

    step: int | None
    path: str
    num_bytes: int
    good: bool = True
    consolidated: str = ""
    """The final model's folder, if it was verified too."""
    note: str = ""


def verify_checkpoint(run: str | None = None) -> VerifiedCheckpoint:
    """Verify a checkpoint, or the newest checkpoint of a run and the run's final model.

    Every file is read completely and compared with its digests.

    Raises:
        CheckpointError: a tensor or file differs from its digest.
    """
    if run is not None and Path(run).name == CONSOLIDATED and Path(run).is_dir():
        return _verify_consolidated(Path(run))
    folder, checkpoint = find_run(run, only_trained=True)
    final = folder.path / CONSOLIDATED
    steps = list_checkpoints(folder.checkpoints)
    path = checkpoint or (steps[-1] if steps else None)
    if path is None:
        raise CheckpointError("the run has no checkpoint.", where=str(folder.checkpoints))
    check_checkpoint(path)
    verified = VerifiedCheckpoint(step=parse_step(path), path=str(path), num_bytes=folder_bytes(path))
    if checkpoint is not None or not final.is_dir():
        return verified
    if check_consolidated(final):
        return replace(verified, consolidated=str(final))
    return replace(verified, note=f"{final} was not compared: {WEIGHTS_RECORD} next to it is missing or has no digests")


def _verify_consolidated(folder: Path) -> VerifiedCheckpoint:
    if not (folder.parent / WEIGHTS_RECORD).exists() or not check_consolidated(folder):
        raise CheckpointError(
            f"{folder} can't be verified: its digests are missing.",
            cause=f"{WEIGHTS_RECORD}, next to it in the run's folder, is missing or from a version without digests",
            hint="paceline ckpt consolidate RUN --to FOLDER writes a new folder from a checkpoint",
        )
    return VerifiedCheckpoint(step=None, path=str(folder), num_bytes=folder_bytes(folder), consolidated=str(folder))


@dataclass(frozen=True, kw_only=True)
class CheckpointDifference:
    """The differences between two checkpoints.

    `tensors` maps a file to the names of the tensors that differ. `only` maps a file to the names that only the first
    checkpoint contains, and to those that only the second contains.
    """

    steps: tuple[int, int]
    tensors: Mapping[str, list[str]]
    only: Mapping[str, tuple[list[str], list[str]]]
    state: list[str]
    """Names of the differing manifest entries that must be equal on a resume."""

    @property
    def is_empty(self) -> bool:
        """True if all tensors are equal, and all manifest entries that must be equal on a resume."""
        return not (self.tensors or self.only or self.state)


def diff_checkpoints(one: str | None, other: str | None) -> CheckpointDifference:
    """Compare two checkpoints (or the newest of two runs) bit by bit, however many ranks wrote each.

    Raises:
        CheckpointError: one of the checkpoints differs from its digests.
    """
    if one is None or other is None:
        raise UsageError("ckpt diff compares two checkpoints.", hint="paceline ckpt diff RUN RUN")
    first, second = (open_checkpoint(_newest_checkpoint(run)) for run in (one, other))
    tensors, only = dict[str, list[str]](), dict[str, tuple[list[str], list[str]]]()
    for file in dict.fromkeys([*first.files, *second.files]):
        a, b = (checkpoint.files.get(file, StoredTensors([])) for checkpoint in (first, second))
        unmatched = ([name for name in a if name not in b], [name for name in b if name not in a])
        differing = _differing_tensors(a, b)
        tensors |= {file: differing} if differing else {}
        only |= {file: unmatched} if any(unmatched) else {}
    identities = [checkpoint.state.get("identity", {}) for checkpoint in (first, second)]
    state = [
        name
        for name in dict.fromkeys([*identities[0], *identities[1]])
        if identities[0].get(name) != identities[1].get(name)
    ]
    return CheckpointDifference(steps=(first.step, second.step), tensors=tensors, only=only, state=state)


def summarize_differences(difference: CheckpointDifference) -> str:
    """Return the text to print: how many tensors of each file differ, and the first few names."""
    lines = [f"step {difference.steps[0]} and step {difference.steps[1]}"]
    for file, names in difference.tensors.items():
        differ = "differs" if len(names) == 1 else "differ"
        lines.append(f"{file}: {plural(len(names), 'tensor')} {differ}: {first_names(names, max_names=5)}")
    for file, unmatched in difference.only.items():
        for ordinal, names in zip(("first", "second"), unmatched, strict=True):
            lines += [f"{file}: only in the {ordinal}: {first_names(names, max_names=5)}"] if names else []
    lines += [f"different: {', '.join(difference.state)}"] if difference.state else []
    return "\n".join(lines if not difference.is_empty else [*lines, "every tensor is the same, bit for bit"])


def _newest_checkpoint(run: str) -> Path:
    folder, checkpoint = find_run(run, only_trained=True)
    return checkpoint or newest_checkpoint(folder)


def _differing_tensors(a: StoredTensors, b: StoredTensors) -> list[str]:
    """Return the names of the tensors that are in both checkpoints and differ.

    If a tensor is stored in the same pieces in both, the digests of the pieces are compared, otherwise the data.
    """
    comparable = [name for name in a if name in b and (a.dtype(name), a.shape(name)) == (b.dtype(name), b.shape(name))]
    same_pieces = {name for name in comparable if _digests(a, name).keys() == _digests(b, name).keys()}
    for stored in (a, b):
        check_digests(piece for name in comparable if name in same_pieces for piece in stored.shards(name))
    equal = {
        name
        for name in comparable
        if (_digests(a, name) == _digests(b, name) if name in same_pieces else a[name].data == b[name].data)
    }
    return [name for name in a if name in b and name not in equal]


def _digests(stored: StoredTensors, name: str) -> dict[tuple[Shape, Shape], str]:
    """Return the digest of each piece, keyed by the piece's offset and shape."""
    return {(piece.offset, piece.entry.shape): piece.entry.digest for piece in stored.shards(name)}


def prune(run: str | None = None, *, keep: int) -> list[Path]:
    """Remove all checkpoints except the last `keep`, the best and the latest; return the removed paths.

    If none of the checkpoints that would remain is intact, nothing is removed.

    Raises:
        UsageError: `keep` is less than 1.
    """
    if keep < 1:
        raise UsageError(f"--keep {keep} would leave no checkpoint.", hint="--keep 1 or more")
    folder, _ = find_run(run, only_trained=True)
    refuse_links(folder.path)
    checkpoint_folder = folder.checkpoints
    if checkpoint_folder.is_symlink():
        raise UsageError(
            f"{checkpoint_folder} is a link: nothing is removed through it.",
            where=str(checkpoint_folder.resolve()),
            hint=f"paceline ckpt prune {checkpoint_folder.resolve().parent} --keep {keep}",
        )
    if is_mark_broken(checkpoint_folder, BEST):
        raise CheckpointError(
            f"{checkpoint_folder / BEST} can't be read: the best checkpoint is not known, so no checkpoint is removed.",
            where=str(checkpoint_folder),
            hint=f"to mark a checkpoint as the best: echo step-NNNNNNNN > {checkpoint_folder / BEST}; "
            f"to mark none: rm {checkpoint_folder / BEST}",
        )
    return checkpoints.prune_checkpoints(checkpoint_folder, keep=keep)


@dataclass(frozen=True, kw_only=True)
class ConsolidatedCheckpoint:
    """The result of `ckpt consolidate`: the folder that was written, the step, and which weights it contains."""

    path: str
    step: int
    weights: str


def consolidate(
    run: str | None = None, *, to: Path, best: bool = False, raw: bool = False, average: bool = False
) -> ConsolidatedCheckpoint:
    """Write a checkpoint's weights as a folder with `model.safetensors`, which other tools can read.

    These are the weights that were evaluated: the average, if the checkpoint has one. With `raw`, the training weights
    are written instead. With `average`, it is an error if the checkpoint has no average. With `best`, the checkpoint
    that is marked best is used instead of the newest one.

    Raises:
        CheckpointError: there is no usable checkpoint, the checkpoint contains no average, or `to` exists.
    """
    if raw and average:
        raise UsageError(
            "--raw and --average name different weights.", hint="give one of them; the average is the default"
        )
    folder, checkpoint = find_run(run, only_trained=True)
    path = resolve_mark(folder.checkpoints, BEST) if best else checkpoint or newest_checkpoint(folder)
    if path is None:
        raise CheckpointError("the run has no best checkpoint.", where=str(folder.checkpoints))
    if to.exists():
        raise CheckpointError(f"{to} exists and is not overwritten.", hint="another --to")
    loaded = open_checkpoint(path)
    if average and AVERAGE not in loaded.files:
        raise CheckpointError(
            f"{path.name} contains no average.",
            where=str(path),
            cause="the job has no ema=",
            hint="leave --average out",
        )
    config = _read_config(folder.path / CONSOLIDATED / "config.json")
    with convert_to_save_error("the consolidated weights", to):
        write_model_folder(to, _model_tensors(loaded, raw=raw), config=config)
    kind = "the average (ema)" if AVERAGE in loaded.files and not raw else "the weights in training"
    return ConsolidatedCheckpoint(path=str(to), step=loaded.step, weights=kind)


def _read_config(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"the model's configuration {path} can't be read: {error}.", where=str(path), hint=f"rm {path}"
        ) from error


def _model_tensors(loaded: OpenCheckpoint, *, raw: bool) -> list[LazyTensor]:
    """Return every tensor of the model, averaged if there is an average. A tensor is read only when it is written."""
    if WEIGHTS not in loaded.files:
        raise CheckpointError(f"{loaded.path.name} has no {WEIGHTS}.", where=str(loaded.path))
    weights, average = loaded.files[WEIGHTS], StoredTensors([]) if raw else loaded.files.get(AVERAGE, StoredTensors([]))
    names = {name: name for name in weights} | loaded.state.get("aliases", {})
    tensors = []
    for name, stored_name in names.items():
        stored = average if stored_name in average else weights
        read = partial(_read_bytes, stored, stored_name)
        tensors.append(
            LazyTensor(name=name, dtype=stored.dtype(stored_name), shape=stored.shape(stored_name), load_data=read)
        )
    return tensors


def _read_bytes(stored: StoredTensors, name: str) -> memoryview:
    return stored[name].data


def _checkpoint_row(path: Path, marks: tuple[str, ...]) -> CheckpointRow:
    num_bytes = folder_bytes(path)
    try:
        check_checkpoint(path)
    except (CheckpointError, MachineError) as error:
        return CheckpointRow(
            step=parse_step(path), path=str(path), num_bytes=num_bytes, good=False, reason=error.what, marks=marks
        )
    return CheckpointRow(step=parse_step(path), path=str(path), num_bytes=num_bytes, good=True, reason="", marks=marks)


def unknown_action_error(action: str) -> UsageError:
    """Return the error for a word that is no `ckpt` action."""
    actions = ("ls", "verify", "diff", "consolidate", "prune")
    return UsageError(
        f"ckpt does not know {action!r}.", cause=did_you_mean(action, actions), hint=f"ckpt {' | '.join(actions)}"
    )


def run_verb(options: Any, _: Sequence[str]) -> tuple[int, Any, str]:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    if options.what == "ls":
        rows = describe_checkpoints(options.run)
        lines = [
            f"{'✓' if row.good else '✗'} step {row.step:>8}  {format_size(row.num_bytes):>12}  {' '.join(row.marks)}  "
            f"{row.reason}".rstrip()
            for row in rows
        ]
        return 0, rows, "\n".join(lines) or "no checkpoints"
    if options.what == "verify":
        row = verify_checkpoint(options.run)
        paths = dict.fromkeys(path for path in (row.path, row.consolidated) if path)
        lines = [f"{path} is intact, bit for bit" for path in paths]
        return 0, row, "\n".join([*lines, *([row.note] if row.note else [])])
    if options.what == "consolidate":
        consolidated = consolidate(
            options.run, to=options.to, best=options.best, raw=options.raw, average=options.average
        )
        return 0, consolidated, f"wrote {consolidated.path}: {consolidated.weights} of step {consolidated.step}"
    if options.what == "diff":
        difference = diff_checkpoints(options.run, options.other)
        return 0, difference, summarize_differences(difference)
    if options.what == "prune":
        removed = prune(options.run, keep=options.keep)
        return (
            0,
            [str(path) for path in removed],
            "\n".join(f"removed {path}" for path in removed) or "nothing to remove",
        )
    raise unknown_action_error(options.what)
