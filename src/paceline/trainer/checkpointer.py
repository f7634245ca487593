"""Saving and resuming a run: the contents and the choice of a checkpoint, and the properties that must be unchanged."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from paceline.checkpoint.collective_write import write_checkpoint
from paceline.checkpoint.consolidate import consolidate
from paceline.checkpoint.error_feedback_state import held_files, load_held
from paceline.checkpoint.files.checkpoint_folder import (
    BEST,
    OpenCheckpoint,
    UnusableCheckpoint,
    is_mark_lost,
    load,
    mark_best,
    newest_good,
    none_usable,
    prune,
    step_name,
    was_saved,
)
from paceline.checkpoint.files.hf_folder import WEIGHTS, digest_files, seal
from paceline.checkpoint.files.manifest import amend_state
from paceline.checkpoint.lr_schedule_state import describe_saved, describe_schedules
from paceline.checkpoint.optimizer_state import Shares, group_names, optimizer_scalars, own_state
from paceline.checkpoint.pipedream_state import Files, StashedWeightsState
from paceline.checkpoint.resume_checks import check_identity, record_settings
from paceline.checkpoint.state_dict_view import list_model
from paceline.checkpoint.tensor_bytes import weights_digest
from paceline.checkpoint.train_state import (
    TrainState,
    files_of,
    grid_state,
    load_ema,
    load_grid,
    load_model,
    load_update,
)
from paceline.checkpoint.unsaved_state_warnings import UntrackedOptimizerState
from paceline.comm.collective_errors import on_all_ranks
from paceline.comm.process_group import World
from paceline.config.task import Task
from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.errors import CheckpointError, PacelineError, ResumeError, raise_all
from paceline.events import CheckpointRefused, CheckpointSaved, Event, Note
from paceline.filesystem.atomic_files import folder_bytes, write_json
from paceline.filesystem.disk_full import as_checkpoint_error
from paceline.filesystem.run_lock import FolderIdentity
from paceline.launch.launcher import kernel_fingerprint
from paceline.planner.layout.host_resources import cpu_name
from paceline.profiling.environment import torch_build
from paceline.run_folder.run_folder import RunFolder
from paceline.step.local_sgd.local_sgd_step import LocalStep
from paceline.step.pipedream.pipedream_step import PipeDreamStep
from paceline.step.synchronous import SynchronousStep
from paceline.step.update_rules import step_rule
from paceline.trainer.local_sgd_state import SitesState, is_writer
from paceline.trainer.setup.build_training_setup import TrainingSetup


def trained_of(built: TrainingSetup) -> TrainState:
    """Return the training state that checkpoints of this run hold."""
    return TrainState(
        model=built.model,
        update=built.update,
        unlisted=built.unlisted,
        weights=built.weights,
        shares=Shares(named=built.named, kept=built.kept, world=built.site),
    )


def run_identity(built: TrainingSetup, *, num_samples: int | None, data: str, job: str = "") -> dict[str, Any]:
    """Return the properties that must be unchanged for a run to be resumed. Every rank must call this.

    `job` is the name of the job's file, or empty for a Python object, which has none.
    """
    trained = trained_of(built)
    groups = group_names(built.update.optimizers, trained.shares)
    optimizers = [
        {"kind": type(o).__name__, "groups": [len(names) for names in held], "options": options, "names": held}
        for o, held, options in zip(built.update.optimizers, groups, built.given, strict=True)
    ]
    return {
        "model": list_model(built.model, weights=built.weights, world=built.site).structure,
        "job": job,
        "data": {"num_samples": num_samples, "fingerprint": data},
        "seed": built.settings.seed,
        "global_batch_size": built.plan.global_batch_size,
        "micro_batch_size": built.plan.micro_batch_size,
        "optimizer": optimizers,
        "schedule": describe_schedules(built.update.schedules, built.update.optimizers, built.given),
        "max_grad_norm": built.settings.train.max_grad_norm,
        "ema": built.job.ema,
        "exact": built.settings.train.exact,
        "kernels": kernel_fingerprint(),
        "precision": built.settings.train.precision,
        "buffers": built.settings.train.buffers,
        "drop_last": built.settings.data.drop_last,
        "sample_seeds": built.settings.data.sample_seeds,
        "update": step_rule(built.plan.rule).identity(built.plan, built.placed.piped),
        "compress": built.plan.compress,
    }


class RuleState(Protocol):
    """The part of a checkpoint that an update rule adds."""

    def extend(self, files: Files, state: dict[str, Any], own: Mapping[str, Tensor]) -> tuple[Files, dict[str, Any]]:
        """Return this rank's files and JSON state with those of the rule; `local_weights` are the trained weights.

        Every rank calls this.
        """

    def view(self, loaded: OpenCheckpoint, *, is_same: bool) -> OpenCheckpoint:
        """Return the checkpoint as this rank reads it; `is_same` says that the same rule saved it."""

    def load(self, loaded: OpenCheckpoint, *, is_same: bool) -> None:
        """Load the rule's own state. Every rank calls this."""


class NoRuleState:
    """The state of a rule that adds nothing to a checkpoint."""

    def extend(self, files: Files, state: dict[str, Any], own: Mapping[str, Tensor]) -> tuple[Files, dict[str, Any]]:
        """Return the files and the state as they are."""
        return files, state

    def view(self, loaded: OpenCheckpoint, *, is_same: bool) -> OpenCheckpoint:
        """Return the checkpoint as it is."""
        return loaded

    def load(self, loaded: OpenCheckpoint, *, is_same: bool) -> None:
        """Load nothing."""


def _stashed_weights(step: PipeDreamStep, built: TrainingSetup) -> RuleState:
    return StashedWeightsState(step=step, weights=built.weights, rank=built.world.rank)


def _sites(step: LocalStep, built: TrainingSetup) -> RuleState:
    return SitesState(built=built, sites=step.sites)


_RULE_STATES: Mapping[type[SynchronousStep], Callable[[Any, TrainingSetup], RuleState]] = {
    PipeDreamStep: _stashed_weights,
    LocalStep: _sites,
}


def rule_state(built: TrainingSetup) -> RuleState:
    """Return what the run's update rule adds to a checkpoint."""
    build = next((_RULE_STATES[kind] for kind in type(built.step).__mro__ if kind in _RULE_STATES), None)
    return NoRuleState() if build is None else build(built.step, built)


class Checkpointer:
    """A writer of one run's checkpoints. Each rank writes the shards that it owns, then rank 0 writes the manifest."""

    def __init__(
        self,
        *,
        built: TrainingSetup,
        folder: Path,
        identity: Mapping[str, Any],
        names: Sequence[str],
        begun_from: OpenCheckpoint | None,
    ) -> None:
        self._built = built
        self._world = built.world
        self._folder = folder
        self._identity = identity
        self._names = names
        self._unsaved = UntrackedOptimizerState(built.update.optimizers, model=built.model, loss=built.job.loss)
        self._place = FolderIdentity(folder.parent)
        self._told_lost = False
        self.last_saved = begun_from.step if begun_from is not None and begun_from.is_in(folder) else -1

    def save(self, *, cursor: Cursor, feed: BatchLoader, extra: Mapping[str, Any], best: bool) -> list[Event]:
        """Save the current state. Every rank must call this; a failure on one rank is raised on all.

        Raises:
            CheckpointError: the checkpoint could not be written; older checkpoints are untouched.
        """
        began = time.perf_counter()
        place = dict(feed.state())
        with self._built.step.synchronised_weights() as own:
            files, state = files_of(trained_of(self._built))
            files, state = rule_state(self._built).extend(files, {**state, "stash": None}, own)
            held, owed = held_files(self._built.placed.reducer)
            files |= held
            state |= {
                "held_back": owed,
                "cursor": cursor.as_json(),
                "feed": place,
                "identity": self._identity,
                "settings": record_settings(self._built.settings),
                "grid": grid_state(self._built.grid),
                "extra": dict(extra),
            }
            path = write_checkpoint(
                self._world, folder=self._folder, step=cursor.step, files=files, state=state, place=self._place
            )
        self.last_saved = cursor.step
        on_all_ranks(self._world, partial(self._mark, path, cursor.step, best))
        lost = self._unsaved.note(self._world)
        if not self._world.is_main:
            return []
        seconds = time.perf_counter() - began
        num_bytes = folder_bytes(path)
        saved = CheckpointSaved(step=cursor.step, path=str(path), seconds=seconds, num_bytes=num_bytes, best=best)
        said = [lost, self._note_lost_mark()]
        return [saved, *(Note(text=text, level="warning") for text in said if text)]

    def _note_lost_mark(self) -> str:
        """Return a warning, once, if the mark of the best checkpoint cannot be read."""
        lost = is_mark_lost(self._folder, BEST) and not self._told_lost
        self._told_lost |= lost
        return (
            f"{self._folder / BEST} can't be read: the best checkpoint is not known, so none is removed. "
            f"To name it: echo step-NNNNNNNN > {self._folder / BEST}"
        ) if lost else ""  # fmt: skip

    def check(self) -> None:
        """Check after a run's first step that all state can be saved. Every rank must call this.

        Raises:
            CheckpointError: the optimizers have state that no checkpoint can hold.
        """
        built = self._built
        optimizers, shares = built.update.optimizers, trained_of(built).shares
        _, scalars = on_all_ranks(built.site, partial(own_state, optimizers, shares))
        optimizer_scalars(optimizers, shares, scalars)
        self._unsaved.begin()

    def amend(self, *, extra: Mapping[str, Any], best: bool) -> None:
        """Write the outcome of an evaluation into the checkpoint of this step. Every rank must call this.

        Raises:
            SaveError: it cannot be written.
        """
        step = self.last_saved
        path = self._folder / step_name(step)
        on_all_ranks(self._world, partial(self._amend, path, extra))
        on_all_ranks(self._world, partial(self._mark, path, step, best))

    def _amend(self, path: Path, extra: Mapping[str, Any]) -> None:
        if self._world.is_main:
            with as_checkpoint_error(f"the evaluation at {path.name}", self._folder):
                amend_state(path, extra=dict(extra))

    def _mark(self, path: Path, step: int, best: bool) -> None:
        if not self._world.is_main:
            return
        if best:
            with as_checkpoint_error(f"that step {step} is the best", self._folder):
                mark_best(self._folder, path)
        with as_checkpoint_error("the list of checkpoints, without the oldest,", self._folder):
            prune(self._folder, keep=self._built.settings.checkpoint.keep)


def checkpoint_to_resume(task: Task) -> str | None:
    """Return the checkpoint to resume from. Call this with the run folder locked: another run may have saved."""
    if task.resume is None and task.verb == "train" and task.run and was_saved(RunFolder(Path(task.run)).checkpoints):
        return "newest"
    return task.resume


def find_checkpoint(folder: Path, *, asked: Path | None, world: World) -> tuple[OpenCheckpoint | None, list[Event]]:
    """Return the checkpoint to resume from: the requested one, or the newest valid one. Rank 0 chooses for all ranks.

    Raises:
        CheckpointError: the requested checkpoint can't be used, or none of several can be used.
    """
    chosen: str | None = None
    told: list[tuple[str, str]] = []
    if world.is_main and asked is None:
        path, bad = newest_good(folder)
        chosen, told = (str(path) if path else None), [(str(r.path), r.reason) for r in bad]
    elif asked is not None:
        chosen = str(asked)
    chosen, told = world.share_json([chosen, told])
    refused = [UnusableCheckpoint(path=Path(path), reason=reason) for path, reason in told]
    events: list[Event] = [CheckpointRefused(path=str(one.path), reason=one.reason) for one in refused]
    if chosen is None:
        if any(not one.is_unfinished for one in refused):
            raise none_usable(folder, refused, instead="start a new run with another --run-dir")
        return None, events
    return load(Path(chosen)), events


def began_as(loaded: OpenCheckpoint) -> Mapping[str, Any]:
    """Return the identity of the run that saved. Fields that older versions did not record are read from the state."""
    state = loaded.state
    names = [{"names": [group["names"] for group in one["groups"]]} for one in state["optimizers"]]
    said = state["identity"]
    optimizers = [{**own, **one} for own, one in zip(names, said["optimizer"], strict=False)]
    return {"schedule": describe_saved(state["schedules"]), **said, "optimizer": optimizers}


def restore(
    loaded: OpenCheckpoint, *, built: TrainingSetup, identity: Mapping[str, Any], allow: Sequence[str]
) -> Cursor:
    """Load the state of model, optimizers, schedules and grid, and return the cursor. Every rank must call this.

    Raises:
        CheckpointError: the checkpoint belongs to another model, or is damaged.
        ResumeError: another property has changed, and `allow` does not permit it.
    """
    with as_state_error(loaded):
        return _restore(loaded, built=built, identity=identity, allow=allow)


@contextmanager
def as_state_error(loaded: OpenCheckpoint) -> Iterator[None]:
    """Convert errors that an unexpected form of the state causes into a `CheckpointError`.

    Raises:
        CheckpointError: this run could not have written the state.
    """
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError) as error:
        raise CheckpointError(
            f"the state in {loaded.path.name} can't be used: {type(error).__name__}: {error}.",
            where=str(loaded.path),
            cause="another version of Paceline wrote it, or it was edited together with its digest",
            hint=f"paceline ckpt ls {loaded.path.parent.parent}, and --resume with an older checkpoint",
        ) from error


def _restore(
    loaded: OpenCheckpoint, *, built: TrainingSetup, identity: Mapping[str, Any], allow: Sequence[str]
) -> Cursor:
    trained = trained_of(built)
    problems: list[PacelineError] = []
    try:
        load_model(loaded, trained)
    except CheckpointError as error:
        problems.append(error)
    try:
        check_identity(began_as(loaded), identity, allow=[*allow, *(["model"] if problems else [])])
    except ResumeError as error:
        problems.append(error)
    raise_all(problems)
    same = loaded.state["identity"].get("update") == identity["update"]
    of_rule = rule_state(built)
    mine = of_rule.view(loaded, is_same=same)
    load_update(mine, trained, began=began_as(loaded), now=identity)
    load_grid(built.grid, loaded.state.get("grid", {}))
    of_rule.load(mine, is_same=same)
    if loaded.state["identity"].get("compress") == identity["compress"]:
        load_held(loaded, built.placed.reducer, world=built.world)
    cursor = Cursor.from_json(loaded.state["cursor"])
    built.step.steps_done = cursor.step
    built.step.replica.buffers.begin()
    return cursor


def restore_weights(loaded: OpenCheckpoint, *, built: TrainingSetup) -> None:
    """Load only the weights, and the average if there is one, for evaluation. Every rank must call this."""
    load_model(loaded, trained_of(built))
    ema = built.update.ema
    if ema is not None:
        on_all_ranks(built.world, lambda: load_ema(loaded, ema, weights=built.weights))


def write_final(built: TrainingSetup, run: Path, *, step: int) -> str:
    """Write `consolidated/`, the model as evaluated, and the weight digest; return a line that names both.

    The digest covers the trained weights, not their average. It is stored with the build and kernels that affect it.
    Every rank must call this; rank 0 writes. If rank 0 holds the whole model, the other ranks do nothing.
    """
    with built.step.synchronised_weights():
        return _write_final(built, run, step=step)


def _write_final(built: TrainingSetup, run: Path, *, step: int) -> str:
    if not is_writer(built) or (built.weights.is_whole and not built.world.is_main):
        return ""
    listing = list_model(built.model, weights=built.weights, world=built.site)
    digest = weights_digest(listing.wholes(sorted(listing.entries)))
    found: dict[str, Any] = {"digest": digest, "of": "the weights in training", "step": step}
    found |= {"torch_build": torch_build(), "cpu": cpu_name(), "kernels": kernel_fingerprint()}
    if built.world.is_main:
        with as_checkpoint_error(WEIGHTS, run):  # remove the old digest until the folder is complete
            (run / WEIGHTS).unlink(missing_ok=True)
    with built.as_evaluated():
        folder = consolidate(
            listing, run / "consolidated", config=getattr(built.model, "config", None), world=built.site
        )
        if built.update.ema is not None:
            found["average"] = weights_digest(listing.wholes(sorted(listing.entries)))
    if built.world.is_main:
        with as_checkpoint_error("weights.json", run):
            write_json(run / WEIGHTS, seal({**found, "files": digest_files(folder)}))
    if built.update.ema is None:
        return f"weights {digest[:16]} in {folder}"
    return f"average {found['average'][:16]} in {folder}, as evaluated (ema); the weights in training: {digest[:16]}"
