"""Save a run: the contents of a checkpoint, the state that update rules add, and the list of kept checkpoints."""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from paceline.checkpoint.collective_write import write_checkpoint
from paceline.checkpoint.error_feedback_state import collect_error_feedback
from paceline.checkpoint.files.checkpoint_folder import (
    BEST,
    OpenCheckpoint,
    is_mark_broken,
    mark_best,
    prune_checkpoints,
    step_name,
)
from paceline.checkpoint.files.manifest import update_state
from paceline.checkpoint.lr_schedule_state import describe_schedules
from paceline.checkpoint.optimizer_state import OptimizerShards, group_names, local_state, optimizer_scalars
from paceline.checkpoint.pipedream_state import Files, StashedWeightsState
from paceline.checkpoint.resume_checks import record_settings
from paceline.checkpoint.state_dict_view import view_state_dict
from paceline.checkpoint.train_state import (
    TrainState,
    collect_files,
    grid_state,
)
from paceline.checkpoint.unsaved_state_warnings import UntrackedStateWarning
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.events import CheckpointSaved, Event, Note
from paceline.filesystem.atomic_files import folder_bytes
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.filesystem.run_lock import FolderIdentity
from paceline.launch.launcher import kernel_fingerprint
from paceline.step.local_sgd.local_sgd_step import LocalStep
from paceline.step.pipedream.pipedream_step import PipeDreamStep
from paceline.step.synchronous import SynchronousStep
from paceline.step.update_rules import step_rule
from paceline.trainer.saving.local_sgd_state import SitesState
from paceline.trainer.saving.remote_tier import RemoteTier
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

    On rank 0, `remote_tier` uploads what is committed; on other ranks, and without a remote store, it is None.

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
        remote_tier: RemoteTier | None = None,
    ) -> None:
        self._setup = setup
        self._remote_tier = remote_tier
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
        path = self.write(
            self._folder, cursor=cursor, loader=loader, progress=progress, folder_identity=self._folder_identity
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

    def write(
        self,
        folder: Path,
        *,
        cursor: Cursor,
        loader: BatchLoader,
        progress: Mapping[str, Any],
        folder_identity: FolderIdentity | None = None,
    ) -> Path:
        """Write a checkpoint of the current state into `folder`, and return its path. Every rank must call this.

        Raises:
            CheckpointError: the checkpoint could not be written; a failure on one rank is raised on all.
        """
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
            return write_checkpoint(
                self._world,
                folder=folder,
                step=cursor.step,
                files=files,
                state=state,
                folder_identity=folder_identity,
            )

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
            path_in_use = None if self._remote_tier is None else self._remote_tier.path_in_use
            prune_checkpoints(self._folder, keep=self._setup.settings.checkpoint.keep, path_in_use=path_in_use)
        if self._remote_tier is not None:
            self._remote_tier.on_commit()
