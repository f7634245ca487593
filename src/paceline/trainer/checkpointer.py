"""Save and resume a run: the contents of a checkpoint, the choice of one to resume, and checks of the resumed run."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from paceline.checkpoint.collective_write import write_checkpoint
from paceline.checkpoint.consolidate import consolidate_weights
from paceline.checkpoint.error_feedback_state import collect_error_feedback, load_error_feedback
from paceline.checkpoint.files.checkpoint_folder import (
    BEST,
    OpenCheckpoint,
    UnusableCheckpoint,
    find_newest_usable,
    has_saves,
    is_mark_broken,
    mark_best,
    no_usable_checkpoint,
    open_checkpoint,
    prune_checkpoints,
    step_name,
)
from paceline.checkpoint.files.hf_folder import WEIGHTS_RECORD, add_digest, digest_files
from paceline.checkpoint.files.manifest import update_state
from paceline.checkpoint.lr_schedule_state import describe_saved_schedules, describe_schedules
from paceline.checkpoint.optimizer_state import OptimizerShards, group_names, local_state, optimizer_scalars
from paceline.checkpoint.pipedream_state import Files, StashedWeightsState
from paceline.checkpoint.resume_checks import check_identity, record_settings
from paceline.checkpoint.state_dict_view import view_state_dict
from paceline.checkpoint.tensor_bytes import weights_digest
from paceline.checkpoint.train_state import (
    TrainState,
    collect_files,
    grid_state,
    load_ema,
    load_grid,
    load_model,
    load_update,
)
from paceline.checkpoint.unsaved_state_warnings import UntrackedStateWarning
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.comm.process_group import World
from paceline.config.task import Task
from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.errors import CheckpointError, PacelineError, ResumeError, raise_all
from paceline.events import CheckpointRefused, CheckpointSaved, Event, Note
from paceline.filesystem.atomic_files import folder_bytes, write_json
from paceline.filesystem.disk_full import convert_to_save_error
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


def build_train_state(setup: TrainingSetup) -> TrainState:
    """Return the training state that checkpoints of this run hold."""
    return TrainState(
        model=setup.model,
        update=setup.update,
        non_persistent_buffers=setup.nonpersistent_buffers,
        weights=setup.weights,
        optimizer_shards=OptimizerShards(
            parameters=setup.named_parameters, sharded=setup.optim_shards, world=setup.site
        ),
    )


def run_identity(setup: TrainingSetup, *, num_samples: int | None, data: str, job: str = "") -> dict[str, Any]:
    """Return the properties that a run must still have when it is resumed, as JSON. Every rank must call this.

    `num_samples` is None for a stream. `data` is the fingerprint of the data. `job` is the name of the job's file, or
    empty for a Python object, which has none.
    """
    train_state = build_train_state(setup)
    groups = group_names(setup.update.optimizers, train_state.optimizer_shards)
    optimizers = [
        {
            "kind": type(o).__name__,
            "groups": [len(names) for names in parameter_names],
            "options": options,
            "names": parameter_names,
        }
        for o, parameter_names, options in zip(setup.update.optimizers, groups, setup.initial_options, strict=True)
    ]
    return {
        "model": view_state_dict(setup.model, weights=setup.weights, world=setup.site).structure,
        "job": job,
        "data": {"num_samples": num_samples, "fingerprint": data},
        "seed": setup.settings.seed,
        "global_batch_size": setup.plan.global_batch_size,
        "micro_batch_size": setup.plan.micro_batch_size,
        "optimizer": optimizers,
        "schedule": describe_schedules(setup.update.lr_schedulers, setup.update.optimizers, setup.initial_options),
        "max_grad_norm": setup.settings.train.max_grad_norm,
        "ema": setup.job.ema,
        "exact": setup.settings.train.exact,
        "kernels": kernel_fingerprint(),
        "precision": setup.settings.train.precision,
        "buffers": setup.settings.train.buffers,
        "drop_last": setup.settings.data.drop_last,
        "sample_seeds": setup.settings.data.sample_seeds,
        "update": step_rule(setup.plan.update_rule).identity(setup.plan, setup.parallelized_model.pipeline_model),
        "compress": setup.plan.compress,
    }


class RuleState(Protocol):
    """The part of a checkpoint that an update rule adds."""

    def extend(
        self, files: Files, state: dict[str, Any], local_weights: Mapping[str, Tensor]
    ) -> tuple[Files, dict[str, Any]]:
        """Return this rank's `files` and JSON `state`, extended by what the rule adds. Every rank calls this.

        Under local SGD, the model contains the sites' mean during this call, and `local_weights` has this rank's own
        weights. Under other rules, `local_weights` is empty.
        """

    def view(self, loaded: OpenCheckpoint, *, is_same_rule: bool) -> OpenCheckpoint:
        """Return the checkpoint as this rank reads it. `is_same_rule` is True if the same update rule saved it."""

    def load(self, loaded: OpenCheckpoint, *, is_same_rule: bool) -> None:
        """Load the rule's own state. Every rank calls this."""


class NoRuleState:
    """The state of a rule that adds nothing to a checkpoint."""

    def extend(
        self, files: Files, state: dict[str, Any], local_weights: Mapping[str, Tensor]
    ) -> tuple[Files, dict[str, Any]]:
        """Return the files and the state as they are."""
        return files, state

    def view(self, loaded: OpenCheckpoint, *, is_same_rule: bool) -> OpenCheckpoint:
        """Return the checkpoint as it is."""
        return loaded

    def load(self, loaded: OpenCheckpoint, *, is_same_rule: bool) -> None:
        """Load nothing."""


def _build_stashed_weights_state(step: PipeDreamStep, setup: TrainingSetup) -> RuleState:
    return StashedWeightsState(step=step, weights=setup.weights, rank=setup.world.rank)


def _build_sites_state(step: LocalStep, setup: TrainingSetup) -> RuleState:
    return SitesState(setup=setup, synchronizer=step.site_synchronizer)


_RULE_STATES: Mapping[type[SynchronousStep], Callable[[Any, TrainingSetup], RuleState]] = {
    PipeDreamStep: _build_stashed_weights_state,
    LocalStep: _build_sites_state,
}


def build_rule_state(setup: TrainingSetup) -> RuleState:
    """Return the state that the run's update rule adds to a checkpoint."""
    build = next((_RULE_STATES[kind] for kind in type(setup.step).__mro__ if kind in _RULE_STATES), None)
    return NoRuleState() if build is None else build(setup.step, setup)


class Checkpointer:
    """A writer of one run's checkpoints. Each rank writes the shards that it owns, then rank 0 writes the manifest.

    `last_saved` is the step of the newest checkpoint in this run's folder that the run has saved or resumed from. It is
    -1 if there is no such checkpoint.
    """

    def __init__(
        self,
        *,
        setup: TrainingSetup,
        folder: Path,
        identity: Mapping[str, Any],
        resumed_checkpoint: OpenCheckpoint | None,
    ) -> None:
        self._setup = setup
        self._world = setup.world
        self._folder = folder
        self._identity = identity
        self._untracked_state = UntrackedStateWarning(setup.update.optimizers, model=setup.model, loss=setup.job.loss)
        self._folder_identity = FolderIdentity(folder.parent)
        self._has_reported_lost_mark = False
        self.last_saved = (
            resumed_checkpoint.step if resumed_checkpoint is not None and resumed_checkpoint.belongs_to(folder) else -1
        )

    def save(self, *, cursor: Cursor, loader: BatchLoader, progress: Mapping[str, Any], is_best: bool) -> list[Event]:
        """Save the current state. Every rank must call this; a failure on one rank is raised on all.

        Raises:
            CheckpointError: the checkpoint could not be written; older checkpoints are untouched.
        """
        start_time = time.perf_counter()
        loader_state = dict(loader.state())
        with self._setup.step.synchronized_weights() as local_weights:
            files, state = collect_files(build_train_state(self._setup))
            # The keys of the state belong to the checkpoint format. "stash" has a pipeline's batches in flight.
            files, state = build_rule_state(self._setup).extend(files, {**state, "stash": None}, local_weights)
            error_feedback_files, error_feedback_state = collect_error_feedback(self._setup.parallelized_model.reducer)
            files |= error_feedback_files
            state |= {
                "held_back": error_feedback_state,
                "cursor": cursor.as_json(),
                "feed": loader_state,
                "identity": self._identity,
                "settings": record_settings(self._setup.settings),
                "grid": grid_state(self._setup.grid),
                "extra": dict(progress),
            }
            path = write_checkpoint(
                self._world,
                folder=self._folder,
                step=cursor.step,
                files=files,
                state=state,
                folder_identity=self._folder_identity,
            )
        self.last_saved = cursor.step
        run_on_all_ranks(self._world, partial(self._mark_and_prune, path, cursor.step, is_best))
        untracked_warning = self._untracked_state.warning_text(self._world)
        if not self._world.is_main:
            return []
        seconds = time.perf_counter() - start_time
        num_bytes = folder_bytes(path)
        saved = CheckpointSaved(step=cursor.step, path=str(path), seconds=seconds, num_bytes=num_bytes, best=is_best)
        warnings = [untracked_warning, self._note_lost_mark()]
        return [saved, *(Note(text=text, level="warning") for text in warnings if text)]

    def _note_lost_mark(self) -> str:
        """Return a warning, once, if the file that names the best checkpoint cannot be read."""
        is_newly_lost = is_mark_broken(self._folder, BEST) and not self._has_reported_lost_mark
        self._has_reported_lost_mark |= is_newly_lost
        return (
            f"{self._folder / BEST} can't be read: the best checkpoint is not known, so none is removed. "
            f"To name it: echo step-NNNNNNNN > {self._folder / BEST}"
        ) if is_newly_lost else ""  # fmt: skip

    def check_savable(self) -> None:
        """Check after a run's first step that all state can be saved. Every rank must call this.

        Raises:
            CheckpointError: the optimizers have state that no checkpoint can hold.
        """
        setup = self._setup
        optimizers, optimizer_shards = setup.update.optimizers, build_train_state(setup).optimizer_shards
        _, scalars = run_on_all_ranks(setup.site, partial(local_state, optimizers, optimizer_shards))
        optimizer_scalars(optimizers, optimizer_shards, scalars)
        self._untracked_state.start_tracking()

    def amend(self, *, progress: Mapping[str, Any], is_best: bool) -> None:
        """Write the outcome of an evaluation into the last saved checkpoint. Every rank must call this.

        Raises:
            SaveError: the outcome cannot be written.
            CheckpointError: the manifest of the checkpoint cannot be read.
        """
        step = self.last_saved
        path = self._folder / step_name(step)
        run_on_all_ranks(self._world, partial(self._amend, path, progress))
        run_on_all_ranks(self._world, partial(self._mark_and_prune, path, step, is_best))

    def _amend(self, path: Path, progress: Mapping[str, Any]) -> None:
        if self._world.is_main:
            with convert_to_save_error(f"the evaluation at {path.name}", self._folder):
                update_state(path, extra=dict(progress))

    def _mark_and_prune(self, path: Path, step: int, is_best: bool) -> None:
        """Mark this checkpoint if it is the best, and remove the oldest checkpoints."""
        if not self._world.is_main:
            return
        if is_best:
            with convert_to_save_error(f"that step {step} is the best", self._folder):
                mark_best(self._folder, path)
        with convert_to_save_error("the list of checkpoints, without the oldest,", self._folder):
            prune_checkpoints(self._folder, keep=self._setup.settings.checkpoint.keep)


def checkpoint_to_resume(task: Task) -> str | None:
    """Return the checkpoint to resume from: a path, any other text for the newest one, or None for a new start.

    Call this after the run folder is locked, because another run may have saved checkpoints there before.
    """
    if task.resume is None and task.verb == "train" and task.run and has_saves(RunFolder(Path(task.run)).checkpoints):
        return "newest"
    return task.resume


def find_checkpoint(folder: Path, *, requested: Path | None, world: World) -> tuple[OpenCheckpoint | None, list[Event]]:
    """Return the checkpoint to resume from: the requested one, or the newest valid one. Rank 0 chooses for all ranks.

    Also return an event for each checkpoint that was refused.

    Raises:
        CheckpointError: the requested checkpoint can't be used, or the folder has checkpoints but none can be used. A
            folder that has only unfinished saves counts as empty.
    """
    chosen_path: str | None = None
    refusals: list[tuple[str, str]] = []
    if world.is_main and requested is None:
        path, unusable = find_newest_usable(folder)
        chosen_path, refusals = (
            (str(path) if path else None),
            [(str(refusal.path), refusal.reason) for refusal in unusable],
        )
    elif requested is not None:
        chosen_path = str(requested)
    chosen_path, refusals = world.share_json([chosen_path, refusals])
    refused = [UnusableCheckpoint(path=Path(path), reason=reason) for path, reason in refusals]
    events: list[Event] = [CheckpointRefused(path=path, reason=reason) for path, reason in refusals]
    if chosen_path is None:
        if any(not checkpoint.is_unfinished for checkpoint in refused):
            raise no_usable_checkpoint(folder, refused, alternative="start a new run with another --run-dir")
        return None, events
    return open_checkpoint(Path(chosen_path)), events


def read_saved_identity(loaded: OpenCheckpoint) -> Mapping[str, Any]:
    """Return the identity of the run that saved the checkpoint.

    Properties that older versions of Paceline did not record as identity are read from the state.
    """
    state = loaded.state
    names = [{"names": [group["names"] for group in entry["groups"]]} for entry in state["optimizers"]]
    identity = state["identity"]
    optimizers = [{**saved_groups, **entry} for saved_groups, entry in zip(names, identity["optimizer"], strict=False)]
    return {"schedule": describe_saved_schedules(state["schedules"]), **identity, "optimizer": optimizers}


def restore(
    loaded: OpenCheckpoint, *, setup: TrainingSetup, identity: Mapping[str, Any], allow: Sequence[str]
) -> Cursor:
    """Load the state of the model, the optimizers and exact mode's grid, and return the cursor. Every rank calls this.

    Raises:
        CheckpointError: the checkpoint belongs to another model, or is damaged.
        ResumeError: another property of the run has changed, and `allow` does not permit that.
    """
    with convert_state_errors(loaded):
        return _restore(loaded, setup=setup, identity=identity, allow=allow)


@contextmanager
def convert_state_errors(loaded: OpenCheckpoint) -> Iterator[None]:
    """Return a context that converts the errors which a malformed state causes into a `CheckpointError`.

    Raises:
        CheckpointError: the state does not have the form that this version writes.
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
    loaded: OpenCheckpoint, *, setup: TrainingSetup, identity: Mapping[str, Any], allow: Sequence[str]
) -> Cursor:
    train_state = build_train_state(setup)
    problems: list[PacelineError] = []
    try:
        load_model(loaded, train_state)
    except CheckpointError as error:
        problems.append(error)
    try:
        check_identity(read_saved_identity(loaded), identity, allow=[*allow, *(["model"] if problems else [])])
    except ResumeError as error:
        problems.append(error)
    raise_all(problems)
    is_same_rule = loaded.state["identity"].get("update") == identity["update"]
    rule_state = build_rule_state(setup)
    rule_view = rule_state.view(loaded, is_same_rule=is_same_rule)
    load_update(rule_view, train_state, saved_identity=read_saved_identity(loaded), current_identity=identity)
    load_grid(setup.grid, loaded.state.get("grid", {}))
    rule_state.load(rule_view, is_same_rule=is_same_rule)
    if loaded.state["identity"].get("compress") == identity["compress"]:
        load_error_feedback(loaded, setup.parallelized_model.reducer, world=setup.world)
    cursor = Cursor.from_json(loaded.state["cursor"])
    setup.step.steps_done = cursor.step
    setup.step.replica.buffers.accept_current_values()
    return cursor


def restore_weights(loaded: OpenCheckpoint, *, setup: TrainingSetup) -> None:
    """Load only the weights, and their average (EMA) if there is one, for evaluation. Every rank must call this."""
    load_model(loaded, build_train_state(setup))
    ema = setup.update.ema
    if ema is not None:
        run_on_all_ranks(setup.world, lambda: load_ema(loaded, ema, weights=setup.weights))


def write_final_weights(setup: TrainingSetup, run: Path, *, step: int) -> str:
    """Write the weight digest and `consolidated/`, the model as evaluated. Return a line that names both.

    The digest covers the trained weights, not their average. Torch's build and kernels affect the digest, so their
    names are written next to it. Every rank must call this, and rank 0 writes. If rank 0 holds the whole model, the
    other ranks do nothing.
    """
    with setup.step.synchronized_weights():
        return _write_final_weights(setup, run, step=step)


def _write_final_weights(setup: TrainingSetup, run: Path, *, step: int) -> str:
    if not is_writer(setup) or (setup.weights.is_unsharded and not setup.world.is_main):
        return ""
    state_view = view_state_dict(setup.model, weights=setup.weights, world=setup.site)
    digest = weights_digest(state_view.full_tensors(sorted(state_view.entries)))
    record: dict[str, Any] = {"digest": digest, "of": "the weights in training", "step": step}
    record |= {"torch_build": torch_build(), "cpu": cpu_name(), "kernels": kernel_fingerprint()}
    if setup.world.is_main:
        with convert_to_save_error(WEIGHTS_RECORD, run):  # remove the old digest until the folder is complete
            (run / WEIGHTS_RECORD).unlink(missing_ok=True)
    with setup.as_evaluated():
        folder = consolidate_weights(
            state_view, run / "consolidated", config=getattr(setup.model, "config", None), world=setup.site
        )
        if setup.update.ema is not None:
            record["average"] = weights_digest(state_view.full_tensors(sorted(state_view.entries)))
    if setup.world.is_main:
        with convert_to_save_error(WEIGHTS_RECORD, run):
            write_json(run / WEIGHTS_RECORD, add_digest({**record, "files": digest_files(folder)}))
    if setup.update.ema is None:
        return f"weights {digest[:16]} in {folder}"
    return f"average {record['average'][:16]} in {folder}, as evaluated (ema); the weights in training: {digest[:16]}"
