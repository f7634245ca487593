"""Resume a run: the choice of a checkpoint, the checks of what has changed, and the loading of its state."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from paceline.checkpoint.error_feedback_state import load_error_feedback
from paceline.checkpoint.files.checkpoint_folder import (
    OpenCheckpoint,
    UnusableCheckpoint,
    find_newest_usable,
    has_saves,
    no_usable_checkpoint,
    open_checkpoint,
    parse_step,
)
from paceline.checkpoint.files.peers.peer_checkpoint import NO_STEP, parse_plan
from paceline.checkpoint.lr_schedule_state import describe_saved_schedules
from paceline.checkpoint.resume_checks import check_identity
from paceline.checkpoint.train_state import (
    load_ema,
    load_grid,
    load_model,
    load_update,
)
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.comm.process_group import World
from paceline.config.task import PreviousFailure, Task
from paceline.data.order.cursor import Cursor
from paceline.errors import CheckpointError, PacelineError, ResumeError, raise_all
from paceline.events import CheckpointRefused, Event, Restarted
from paceline.launch.failures.failure_record import Failure
from paceline.reporting.failures import read_failures
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.saving.checkpointer import build_rule_state, build_train_state
from paceline.trainer.saving.memory.open_memory import open_peer_files
from paceline.trainer.saving.memory.peer_memory import find_peer_checkpoint
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.duration import Progress


def checkpoint_to_resume(task: Task) -> str | None:
    """Return the checkpoint to resume from: a path, any other text for the newest one, or None for a new start.

    Call this after the run folder is locked, because another run may have saved checkpoints there before.
    """
    folders = [RunFolder(Path(task.run)).checkpoints] if task.run else []
    folders += [Path(task.memory_folder)] if task.memory_folder and task.peer_plan is None else []
    has_peer_checkpoint = task.peer_plan is not None and parse_plan(task.peer_plan).step != NO_STEP  # on some node
    if task.resume is None and task.verb == "train" and (has_peer_checkpoint or any(map(has_saves, folders))):
        return "newest"
    return task.resume


def find_checkpoint(
    folder: Path,
    *,
    requested: Path | None,
    world: World,
    memory_folder: Path | None = None,
    download: Callable[[Path], tuple[Path | None, list[Event]]] | None = None,
    share_choice: Callable[[Callable[[], Any]], Any] | None = None,
) -> tuple[OpenCheckpoint | None, list[Event]]:
    """Return the checkpoint to resume from: the requested one, or the newest valid one. Rank 0 chooses for all ranks.

    `memory_folder` has the checkpoints in memory of this command's last attempt. One of them is used if it is newer
    than those on disk, or instead of the requested one, from which this command has started. If there is none at all,
    rank 0 calls `download(folder)`, which may put one there. `share_choice` runs the choice of rank 0, and shares it
    with the other ranks, however long a download takes. Also return an event for each checkpoint that was refused.

    Raises:
        CheckpointError: the requested checkpoint can't be used, or the folder has checkpoints but none can be used. A
            folder that has only unfinished saves counts as empty.
    """
    if requested is not None and memory_folder is None:
        return open_checkpoint(requested), []
    events: list[Event] = []

    def choose() -> tuple[str | None, list[tuple[str, str]]]:
        in_memory = find_newest_usable(memory_folder)[0] if memory_folder is not None else None
        if requested is not None:
            return str(in_memory or requested), []
        path, unusable = find_newest_usable(folder)
        if in_memory is not None and (path is None or parse_step(in_memory) > parse_step(path)):
            path = in_memory
        if path is None and download is not None:
            path, download_events = download(folder)
            events.extend(download_events)
        return (str(path) if path else None), [(str(refusal.path), refusal.reason) for refusal in unusable]

    if share_choice is not None:
        chosen_path, refusals = share_choice(choose)
    else:
        chosen_path, refusals = world.share_json(choose() if world.is_main else None)
    refused = [UnusableCheckpoint(path=Path(path), reason=reason) for path, reason in refusals]
    events[:0] = [CheckpointRefused(path=path, reason=reason) for path, reason in refusals]
    if chosen_path is None:
        if any(not checkpoint.is_unfinished for checkpoint in refused):
            raise no_usable_checkpoint(folder, refused, alternative="start a new run with another --run-dir")
        return None, events
    return open_checkpoint(Path(chosen_path)), events


def find_checkpoint_of_restart(
    task: Task,
    folder: Path,
    *,
    requested: Path | None,
    world: World,
    download: Callable[[Path], tuple[Path | None, list[Event]]] | None,
    share_choice: Callable[[Callable[[], Any]], Any] | None,
) -> tuple[OpenCheckpoint | None, list[Event]]:
    """Return what `find_checkpoint` returns. After a restart, a newer checkpoint in memory is used.

    Raises:
        CheckpointError: as `find_checkpoint`.
    """
    memory_folder: Path | None = None
    peer_events: list[Event] = []
    if task.restart is not None and task.peer_plan is not None:  # on all ranks alike
        folder_here = Path(task.memory_folder) if task.memory_folder else None
        plan, files = parse_plan(task.peer_plan), open_peer_files(world, task)
        loaded, peer_events = find_peer_checkpoint(folder_here, plan, files, world=world)
        if loaded is not None:
            return loaded, peer_events
    elif task.restart is not None and task.memory_folder:
        memory_folder = Path(task.memory_folder)
    loaded, events = find_checkpoint(
        folder,
        requested=requested,
        world=world,
        memory_folder=memory_folder,
        download=download,
        share_choice=share_choice,
    )
    return loaded, [*peer_events, *events]


def read_previous_failure(folder: Path) -> PreviousFailure | None:
    """Return the first failure that the ranks of an attempt have recorded in its folder, or None."""
    recorded, _ = read_failures(folder)
    try:
        failure = msgspec.convert(recorded, Failure)
    except msgspec.ValidationError:
        return None
    return PreviousFailure(reason=failure.summary, failed_step=failure.step, monotonic_ns=failure.monotonic_ns)


def restart_events(task: Task, loaded: OpenCheckpoint | None, *, resumed_step: int) -> list[Event]:
    """Return the event of this run's restart by itself, or no event if a command started this attempt."""
    previous = task.restart
    if previous is None:
        return []
    is_in_memory = loaded is not None and bool(task.memory_folder) and loaded.belongs_to(Path(task.memory_folder))
    event = Restarted(
        attempt=task.attempt,
        reason=previous.reason,
        failed_step=previous.failed_step,
        resumed_step=resumed_step,
        repeated_steps=max(0, previous.failed_step - resumed_step),
        seconds=(time.monotonic_ns() - previous.monotonic_ns) / 1e9,
        source="memory" if is_in_memory else "disk",
    )
    return [event]


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


def restore_progress(setup: TrainingSetup, loaded: OpenCheckpoint | None) -> Progress:
    """Return the progress that a checkpoint holds. The spike detector continues with its history."""
    progress = Progress.from_json(loaded.state.get("extra", {}) if loaded else {})
    if setup.update.spike_detector is not None:
        setup.update.spike_detector.history = progress.spike_history
    return progress
