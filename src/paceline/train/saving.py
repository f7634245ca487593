"""Saving and resuming a run: what goes into a checkpoint, which one is used, what must not have changed."""

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, PacelineError, ResumeError, SaveError, raise_all
from paceline.events import CheckpointRefused, CheckpointSaved, Event
from paceline.feed.feed import Feed
from paceline.measure.environment import cpu_name, torch_build
from paceline.order.cursor import Cursor
from paceline.spec.task import Task
from paceline.start import EXACT_KERNELS, kernels
from paceline.store.checkpoints import (
    Loaded,
    load,
    mark_best,
    marked,
    newest_good,
    prune,
    save,
    was_saved,
)
from paceline.store.disk import folder_bytes, sync_folder, write_json
from paceline.store.full import written
from paceline.store.runs import RunFolder
from paceline.store.tensors import write_tensors
from paceline.train.apart import tensors_of
from paceline.train.built import Built
from paceline.train.convert import structure, to_bytes, weights_digest
from paceline.train.options import optimizer_difference
from paceline.train.state import files_of, grid_state, load_ema, load_grid, load_model, load_update
from paceline.world import World

_CAUSE = "another setting, another job file, or other data"


def identity(built: Built, *, num_samples: int | None, data: str) -> dict[str, Any]:
    """What must be the same for a run to be gone on with."""
    optimizers = [
        {"kind": type(o).__name__, "groups": [len(g["params"]) for g in o.param_groups], "options": options}
        for o, options in zip(built.update.optimizers, built.given, strict=True)
    ]
    return {
        "model": structure(tensors_of(built.model)),
        "data": {"num_samples": num_samples, "fingerprint": data},
        "seed": built.settings.seed,
        "global_batch_size": built.plan.global_batch_size,
        "micro_batch_size": built.plan.micro_batch_size,
        "optimizer": optimizers,
        "exact": built.settings.train.exact,
        "kernels": kernels(),
        "precision": built.settings.train.precision,
    }


def check_identity(saved: Mapping[str, Any], now: Mapping[str, Any], *, allow: Sequence[str]) -> None:
    """Refuse a resume that would be another run.

    Exact mode is computed by other kernels: where it or they may change, so may the last bits of data that a job
    computes. Kernels are part of a run where it is exact before and after, and its checkpoint names them.

    Raises:
        ResumeError: with every difference.
    """
    if any(name in allow and saved.get(name) != now[name] for name in ("exact", "kernels")):
        now = {**now, "data": {**now["data"], "fingerprint": saved["data"]["fingerprint"]}}
    if not (saved.get("exact") and now["exact"] and "kernels" in saved):
        now = {name: value for name, value in now.items() if name != "kernels"}
    differing = {name: _difference(name, saved.get(name), now[name]) for name in now if name not in allow}
    changed = [name for name, text in differing.items() if text]
    if changed:
        lines = [f"{name}: {differing[name]}" for name in changed]
        cause, hint = _CAUSE, f"--allow {','.join(changed)} to go on all the same"
        if changed == ["kernels"]:
            cause = f"another {EXACT_KERNELS} in the environment, and with it other last bits"
            hint = f"{EXACT_KERNELS}={saved['kernels']} before the same command, or {hint}"
        raise ResumeError(f"this is not the run that was saved: {'; '.join(lines)}.", cause=cause, hint=hint)


class Saver:
    """Writes checkpoints of one run; rank 0 writes, all wait."""

    def __init__(
        self,
        *,
        built: Built,
        folder: Path,
        identity: Mapping[str, Any],
        names: Sequence[str],
        begun_from: Loaded | None,
    ) -> None:
        self._built = built
        self._folder = folder
        self._identity = identity
        self._names = names
        self.last_saved = begun_from.step if begun_from is not None and begun_from.is_in(folder) else -1

    def save(self, *, cursor: Cursor, feed: Feed, extra: Mapping[str, Any], best: bool) -> list[Event]:
        """Save the present state. Every rank calls this; a failure on rank 0 is every rank's.

        Raises:
            CheckpointError: it could not be written.
        """
        events: list[Event] = []
        problem: dict[str, str] | None = None
        place = dict(feed.state())
        if self._built.world.is_main:
            try:
                events = [self._write(cursor, place, extra, best)]
            except CheckpointError as error:
                problem = error.as_json()
        problem = self._built.world.share_json(problem)
        if problem is not None:
            kind = SaveError if problem["error"] == SaveError.__name__ else CheckpointError
            raise kind(problem["what"], where=problem["where"], cause=problem["cause"], hint=problem["hint"])
        self.last_saved = cursor.step
        return events

    def _write(self, cursor: Cursor, place: Mapping[str, Any], extra: Mapping[str, Any], best: bool) -> CheckpointSaved:
        began = time.perf_counter()
        files, state = files_of(model=self._built.model, update=self._built.update, unlisted=self._built.unlisted)
        state |= {
            "cursor": cursor.as_json(),
            "feed": dict(place),
            "identity": self._identity,
            "grid": grid_state(self._built.grid),
            "extra": dict(extra),
        }
        path = save(self._folder, step=cursor.step, files=files, state=state)
        if best:
            with written(f"that step {cursor.step} is the best", self._folder):
                mark_best(self._folder, path)
        with written("the list of checkpoints, without the oldest,", self._folder):
            prune(self._folder, keep=self._built.settings.checkpoint.keep)
        return CheckpointSaved(
            step=cursor.step,
            path=str(path),
            seconds=time.perf_counter() - began,
            num_bytes=folder_bytes(path),
            best=best,
        )


def goes_on(task: Task) -> str | None:
    """What to go on from. Asked again once the folder is this run's: another may have saved there and ended since."""
    if task.resume is None and task.verb == "train" and task.run and was_saved(RunFolder(Path(task.run)).checkpoints):
        return "newest"
    return task.resume


def find_checkpoint(folder: Path, *, asked: Path | None, world: World) -> tuple[Loaded | None, list[Event]]:
    """The checkpoint to go on from: the one asked for, or the newest good one. Rank 0 chooses for all.

    Raises:
        CheckpointError: the one asked for can't be used, or none of several can.
    """
    chosen: str | None = None
    refused: list[tuple[str, str]] = []
    if world.is_main and asked is None:
        path, bad = newest_good(folder)
        chosen, refused = (str(path) if path else None), [(str(r.path), r.reason) for r in bad]
    elif asked is not None:
        chosen = str(asked)
    chosen, refused = world.share_json([chosen, refused])
    events: list[Event] = [CheckpointRefused(path=path, reason=reason) for path, reason in refused]
    if chosen is None:
        whole = [path for path, reason in refused if "interrupted" not in reason]
        if whole:
            raise CheckpointError(
                f"none of the {len(whole)} checkpoints can be used; the newest: {refused[0][1]}",
                where=str(folder),
                hint="paceline ckpt ls, or start anew with another --run-dir",
            )
        return None, events
    return load(Path(chosen)), events


def restore(loaded: Loaded, *, built: Built, identity: Mapping[str, Any], allow: Sequence[str]) -> Cursor:
    """Give model, optimizers, schedules and grid their state; returns the cursor.

    Raises:
        CheckpointError: it is another model's.
        ResumeError: something else has changed that was not allowed to.
    """
    problems: list[PacelineError] = []
    try:
        load_model(loaded, built.model, unlisted=built.unlisted)
    except CheckpointError as error:
        problems.append(error)
    try:
        check_identity(loaded.state["identity"], identity, allow=[*allow, *(["model"] if problems else [])])
    except ResumeError as error:
        problems.append(error)
    raise_all(problems)
    load_update(loaded, model=built.model, update=built.update, given=built.given)
    load_grid(built.grid, loaded.state.get("grid", {}))
    cursor = Cursor.from_json(loaded.state["cursor"])
    built.step.step = cursor.step
    built.step.parts.buffers.begin()
    return cursor


def restore_weights(loaded: Loaded, *, built: Built) -> None:
    """Give only the weights, and the average if there is one, for evaluation."""
    load_model(loaded, built.model, unlisted=built.unlisted)
    if built.update.ema is not None:
        load_ema(loaded, built.update.ema)


def write_final(built: Built, run: Path, *, step: int) -> str:
    """Write `consolidated/`, the model that was evaluated, and the digest of the weights; returns a line about both.

    The digest is that of the weights in training, with or without an average; beside it, what its bits depend on.
    """
    digest = weights_digest(tensors_of(built.model))
    found: dict[str, Any] = {"digest": digest, "of": "the weights in training", "step": step}
    found |= {"torch_build": torch_build(), "cpu": cpu_name(), "kernels": kernels()}
    with built.as_evaluated():
        folder = consolidate(built, run / "consolidated")
        if built.update.ema is not None:
            found["average"] = weights_digest(tensors_of(built.model))
    with written("weights.json", run):
        write_json(run / "weights.json", found)
    if built.update.ema is None:
        return f"weights {digest[:16]} in {folder}"
    return f"average {found['average'][:16]} in {folder}, as evaluated (ema); the weights in training: {digest[:16]}"


def consolidate(built: Built, folder: Path) -> Path:
    """Write the weights as the folder that transformers and vLLM open: every name, plain safetensors.

    Raises:
        CheckpointError: it could not be written.
    """
    aside = folder.with_name(f".{folder.name}.tmp")
    try:
        with written("the consolidated weights", folder):
            _consolidate(built, folder, aside=aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder


def _consolidate(built: Built, folder: Path, *, aside: Path) -> None:
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    tensors = [to_bytes(name, value) for name, value in tensors_of(built.model).items()]  # a tied one under each name
    write_tensors(aside / "model.safetensors", tensors)
    config: Any = getattr(built.model, "config", None)
    if hasattr(config, "to_dict"):
        write_json(aside / "config.json", config.to_dict())
    sync_folder(aside)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)


def best_path(folder: Path) -> Path | None:
    """The best checkpoint, if one was marked."""
    return marked(folder, "best")


def _difference(name: str, saved: Any, now: Any) -> str:
    if name == "optimizer":
        return optimizer_difference(saved, now)
    return "" if saved == now else f"was {_short(saved)}, is {_short(now)}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
