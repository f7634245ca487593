"""Save a run: the contents of a checkpoint, the state that update rules add, and the list of kept checkpoints."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torch import Tensor

from paceline.checkpoint.collective_write import write_checkpoint
from paceline.checkpoint.error_feedback_state import collect_error_feedback
from paceline.checkpoint.files.checkpoint_folder import (
    BEST,
    LATEST,
    OpenCheckpoint,
    has_saves,
    is_mark_broken,
    mark_best,
    prune_checkpoints,
    resolve_mark,
    step_name,
)
from paceline.checkpoint.files.manifest import update_state
from paceline.checkpoint.files.two_phase_commit import total_bytes
from paceline.checkpoint.optimizer_state import OptimizerShards
from paceline.checkpoint.pipedream_state import Files, StashedWeightsState
from paceline.checkpoint.resume_checks import record_settings
from paceline.checkpoint.train_state import (
    TrainState,
    collect_files,
    grid_state,
)
from paceline.checkpoint.unsaved_state_warnings import UntrackedStateWarning
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.config.task import Task
from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.errors import SaveError
from paceline.events import CheckpointSaved, Event, Note
from paceline.filesystem.atomic_files import folder_bytes
from paceline.filesystem.disk_full import convert_to_save_error, require_free_space
from paceline.filesystem.run_lock import FolderIdentity
from paceline.step.local_sgd.local_sgd_step import LocalStep
from paceline.step.pipedream.pipedream_step import PipeDreamStep
from paceline.step.synchronous import SynchronousStep
from paceline.trainer.saving.background_saves import BackgroundSaves
from paceline.trainer.saving.local_sgd_state import SitesState
from paceline.trainer.saving.memory.memory_folder import MemoryFolder
from paceline.trainer.saving.memory.open_memory import open_memory
from paceline.trainer.saving.memory.rank_memory import RankMemory
from paceline.trainer.saving.remote_tier import RemoteTier
from paceline.trainer.saving.space_checks import warn_of_full_disk
from paceline.trainer.setup.build_training_setup import TrainingSetup

T = TypeVar("T")


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

    On rank 0, `remote_tier` uploads what is committed, also by a save in the background; on other ranks, and without a
    remote store, it is None.

    `last_saved` is the step of the newest checkpoint in this run's folder that the run has saved or resumed from. It is
    -1 if there is no such checkpoint. `last_started` also counts a save that is still written in the background. Both
    are equal on all ranks.

    `has_saved` says whether the run folder has a checkpoint; one in memory does not count.

    `needs_trial` is True until the first save of a new run with a grace period (`survive.grace`). Such a run saves
    after its first step, to find out how long a save takes. An additional save would change an asynchronous run.
    """

    def __init__(
        self,
        *,
        setup: TrainingSetup,
        folder: Path,
        identity: Mapping[str, Any],
        resumed_checkpoint: OpenCheckpoint | None,
        has_saved: bool,
        memory: RankMemory | None = None,
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
        self.last_started = self.last_saved
        has_grace_period = setup.settings.survive.grace is not None and setup.plan.update_rule.is_synchronous
        self.has_saved = has_saved
        self.needs_trial = has_grace_period and not has_saved
        self.memory = memory
        self._background = BackgroundSaves(
            world=setup.world,
            folder=folder,
            folder_identity=self._folder_identity,
            memory=memory if isinstance(memory, MemoryFolder) else None,
            is_on=setup.settings.checkpoint.background,
        )

    @property
    def uses_background(self) -> bool:
        """Return whether a save may be written to disk while the training continues."""
        return self._background.is_on

    def save(
        self,
        *,
        cursor: Cursor,
        loader: BatchLoader,
        progress: Mapping[str, Any],
        is_best: bool,
        in_background: bool = False,
    ) -> list[Event]:
        """Save the current state. Every rank must call this; a failure on one rank is raised on all.

        With `in_background`, and if the run `uses_background`, the checkpoint is written to disk after this call. A
        failure is then reported by the next call of `save` or `complete`. A save waits for the one before.

        Raises:
            CheckpointError: the checkpoint could not be written; older checkpoints are untouched.
        """
        start_time, step = time.perf_counter(), cursor.step
        events = self.complete()
        write_with = partial(self.write, cursor=cursor, loader=loader, progress=progress)
        source = None
        if in_background and self.uses_background:
            source, notes = self._background.write_to_memory(
                lambda memory: write_with(partial(memory.write, step=step))
            )
            events += notes
        if source is not None:
            finish_save = partial(
                self._finish_save, step=step, is_best=is_best, start_time=start_time, continue_time=time.perf_counter()
            )
            self._background.start_copy(source, step=step, finish_save=finish_save)
        else:
            path = write_with(
                partial(
                    write_checkpoint,
                    self._world,
                    folder=self._folder,
                    step=step,
                    folder_identity=self._folder_identity,
                )
            )
            self.last_saved = step
            finish_save = partial(self._finish_save, path, step=step, is_best=is_best, start_time=start_time)
            saved = run_on_all_ranks(self._world, lambda: finish_save() if self._world.is_main else None)
            events += [saved] if saved is not None else []
        self.last_started, self.needs_trial = step, False
        untracked_warning = self._untracked_state.warning_text(self._world)
        if not self._world.is_main:
            return []
        warnings = [untracked_warning, self._note_lost_mark()]
        return [*events, *(Note(text=text, level="warning") for text in warnings if text)]

    @contextmanager
    def tolerating_failure(self, *, is_final: bool) -> Iterator[list[Event]]:
        """Return a context for a save, and a list for its events. A run that has saved before survives a failed save.

        Instead of the error, the list then has a warning, and the run continues. The error is raised if the save
        `is_final`, or if the run has not saved yet, because then its settings are probably wrong.
        """
        events: list[Event] = []
        try:
            yield events
        except SaveError as error:
            if is_final or not self.has_saved:
                raise
            events += self._failure_warnings(error)

    def _failure_warnings(self, error: SaveError) -> list[Event]:
        """Return a warning, on rank 0, about a failed save of a run that has saved before."""
        self.last_started = self.last_saved
        cause = f" Likely cause: {error.cause}." if error.cause else ""
        if not self._world.is_main:
            return []
        newest = resolve_mark(self._folder, LATEST)
        text = (
            f"a checkpoint could not be saved: {error.what} ({error.where}){cause} The training continues, and the "
            f"next save tries again. The newest checkpoint on disk is {newest.name if newest else 'not readable'}"
        )
        return [Note(text=text, level="warning")]

    def complete(self) -> list[Event]:
        """Wait until the last save in the background is on disk, and return its event. Every rank must call this.

        If the save failed, return a warning, because the caller saves next. The error is raised if the run has not
        saved before.

        Raises:
            CheckpointError: the first checkpoint of the run could not be written.
        """
        try:
            self._background.complete()
        except SaveError as error:
            if not self.has_saved:
                raise
            return [*self._background.take_events(), *self._failure_warnings(error)]
        self.last_saved = self.last_started
        self.has_saved = self.has_saved or self.last_saved >= 0
        return self._background.take_events()

    def take_events(self) -> list[Event]:
        """Return the events of saves in the background that have been committed since the last call."""
        return self._background.take_events()

    def close(self) -> None:
        """Wait until nothing is written any more. A failure is not raised, because the run has ended in another way."""
        self._background.close()
        if self.memory is not None:
            self.memory.close()

    def write(self, write: Callable[..., T], *, cursor: Cursor, loader: BatchLoader, progress: Mapping[str, Any]) -> T:
        """Collect the current state, and return what `write(files=, state=)` returns. Every rank must call this.

        `files` has the tensors of this rank, and `state` everything else.

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
            return write(files=files, state=state)

    def _note_lost_mark(self) -> str:
        """Return a warning, once, if the file that names the best checkpoint cannot be read."""
        is_newly_lost = is_mark_broken(self._folder, BEST) and not self._has_reported_lost_mark
        self._has_reported_lost_mark |= is_newly_lost
        return (
            f"{self._folder / BEST} can't be read: the best checkpoint is not known, so none is removed. "
            f"To name it: echo step-NNNNNNNN > {self._folder / BEST}"
        ) if is_newly_lost else ""  # fmt: skip

    def check_savable(self, *, cursor: Cursor, loader: BatchLoader, progress: Mapping[str, Any]) -> list[Event]:
        """Check after a run's first step that all state can be saved. Every rank must call this.

        The disk must have room for a checkpoint, unless the run has saved before: there may be space again by the next
        save. Return a warning if the disk has no room for all checkpoints that the run keeps.

        Raises:
            CheckpointError: the optimizers have state that no checkpoint can hold, or the disk is too full.
        """
        num_bytes = self.write(self._measure, cursor=cursor, loader=loader, progress=progress)
        self._untracked_state.start_tracking()
        is_required = self._world.is_main and not self.has_saved
        run_on_all_ranks(self._world, lambda: self._require_space(num_bytes) if is_required else None)
        num_kept = self._setup.settings.checkpoint.keep
        warning = warn_of_full_disk(self._folder, num_bytes, num_kept=num_kept) if self._world.is_main else ""
        return [Note(text=warning, level="warning")] if warning else []

    def _measure(self, *, files: Files, state: Mapping[str, Any]) -> int:
        """Return the size of a checkpoint's tensors on all ranks, in bytes."""
        return sum(self._world.gather_json(total_bytes(files)))

    def _require_space(self, num_bytes: int) -> None:
        with convert_to_save_error("the first checkpoint", self._folder):
            require_free_space(self._folder, num_bytes)

    def amend(self, *, progress: Mapping[str, Any], is_best: bool) -> list[Event]:
        """Write the outcome of an evaluation into the last checkpoint. Every rank must call this.

        If this checkpoint is still written in the background, its outcome is too. If the outcome can't be written,
        return a warning: a run that resumes from this checkpoint evaluates again.

        Raises:
            CheckpointError: the manifest of the checkpoint cannot be read.
        """
        amend = partial(self._amend, self.last_started, progress, is_best)
        if self._background.is_writing:
            self._background.add(amend)
        else:
            try:
                run_on_all_ranks(self._world, lambda: amend() if self._world.is_main else None)
            except SaveError as error:
                text = f"{error.what} ({error.where}) A run that resumes from this checkpoint evaluates again"
                return [Note(text=text, level="warning")] if self._world.is_main else []
        return []

    def _amend(self, step: int, progress: Mapping[str, Any], is_best: bool) -> None:
        path = self._folder / step_name(step)
        with convert_to_save_error(f"the evaluation at {path.name}", self._folder):
            update_state(path, extra=dict(progress))
        self._mark_and_prune(path, step, is_best)

    def _finish_save(
        self, path: Path, *, step: int, is_best: bool, start_time: float, continue_time: float | None = None
    ) -> CheckpointSaved:
        """Mark and report a committed checkpoint, and remove the oldest checkpoints. Only rank 0 calls this.

        The save began at `start_time`. In the background, the training continued at `continue_time`.
        """
        self._mark_and_prune(path, step, is_best)
        end_time = time.perf_counter()
        continue_time = continue_time or end_time
        return CheckpointSaved(
            step=step,
            path=str(path),
            seconds=continue_time - start_time,
            num_bytes=folder_bytes(path),
            best=is_best,
            background_seconds=end_time - continue_time,
        )

    def _mark_and_prune(self, path: Path, step: int, is_best: bool) -> None:
        """Mark this checkpoint if it is the best, remove the oldest checkpoints, and call `on_commit`."""
        if is_best:
            with convert_to_save_error(f"that step {step} is the best", self._folder):
                mark_best(self._folder, path)
        with convert_to_save_error("the list of checkpoints, without the oldest,", self._folder):
            path_in_use = None if self._remote_tier is None else self._remote_tier.path_in_use
            prune_checkpoints(self._folder, keep=self._setup.settings.checkpoint.keep, path_in_use=path_in_use)
        if self._remote_tier is not None:
            self._remote_tier.on_commit()


def open_checkpointer(
    setup: TrainingSetup,
    task: Task,
    *,
    folder: Path,
    identity: Mapping[str, Any],
    resumed_checkpoint: OpenCheckpoint | None,
    remote_tier: RemoteTier | None,
) -> Checkpointer:
    """Return the checkpointer of a run, with the memory of its command."""
    return Checkpointer(
        setup=setup,
        folder=folder,
        identity=identity,
        resumed_checkpoint=resumed_checkpoint,
        has_saved=bool(setup.world.share_json(has_saves(folder) if setup.world.is_main else None)),
        memory=open_memory(setup, task),
        remote_tier=remote_tier,
    )
