"""The start of a run with a remote store: the checks of the store, and what a machine with an empty disk downloads.

Rank 0 does this for all ranks, before the model is built. The checkpoint itself is downloaded later, when the run looks
for one and finds none on disk.
"""

import re
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from paceline.checkpoint.files.checkpoint_folder import list_checkpoints, parse_step
from paceline.checkpoint.files.remote_errors import RemoteError
from paceline.checkpoint.files.remote_folder import CHECKPOINTS, RemoteFolder
from paceline.checkpoint.files.remote_store import (
    RemoteStore,
    check_remote_url,
    is_remote_url,
    open_remote_store,
    remote_url,
)
from paceline.comm.process_group import World
from paceline.config.settings import Settings
from paceline.console.formatting import format_duration, format_size
from paceline.console.output import print_line
from paceline.errors import CheckpointError, ExitCode, PacelineError, PeerError, UsageError
from paceline.events import CheckpointRefused, Event, EventBus, Note
from paceline.filesystem.atomic_files import folder_bytes, parse_json, write_json, write_text
from paceline.launch.agent.shared_status import BUSY_PHASES, open_heartbeat
from paceline.launch.agent.signals import stop_flag
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.saving.remote_tier import RECORDS, RemoteTier
from paceline.trainer.saving.resume_run import checkpoint_to_resume
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.prepare import PreparedJob, number_attempt

T = TypeVar("T")
OWNER = "remote.json"
"""The file in a run folder that says which folder of a store belongs to the run."""
_REMOTE_OWNER = "run.json"
_POLL_SECONDS = (0.02, 0.5)


@dataclass(frozen=True, kw_only=True)
class RemoteConnection:
    """The remote stores of a run, on rank 0. Checkpoints are uploaded to `target`, and downloaded from `source`.

    `step_name` is the checkpoint that the user named; it is empty for the newest one.
    """

    target: RemoteFolder | None
    source: RemoteFolder | None
    step_name: str = ""
    events: tuple[Event, ...] = ()

    def download(self, checkpoints: Path) -> tuple[Path | None, list[Event]]:
        """Download the checkpoint to resume from. Return its path, or None if there is none, and what to report.

        Raises:
            CheckpointError: the store has checkpoints, but none is intact.
            MachineError: the server can't be reached.
            UsageError: the store can't be read with these credentials.
            SaveError: there is no space on the disk.
        """
        if self.source is None:
            return None, []
        print_line(f"the disk has no checkpoint: downloading from {self.source.store.url}")
        start_time = time.monotonic()
        refused: list[tuple[str, str]] = []
        path: Path | None
        try:
            if self.step_name:
                path = self.source.download(self.step_name, checkpoints)
            else:
                path, refused = self.source.download_newest(checkpoints)
        except RemoteError as error:
            raise error.start_error from None
        events: list[Event] = [CheckpointRefused(path=url, reason=reason) for url, reason in refused]
        if path is None and refused:
            raise CheckpointError(
                f"none of the {len(refused)} checkpoints can be used; the newest: {refused[0][1]}",
                where=self.source.store.url,
                hint="start a new run with another --run-dir",
            )
        if path is None:
            return None, []
        amount = f"{format_size(folder_bytes(path))} in {format_duration(time.monotonic() - start_time)}"
        return path, [*events, Note(text=f"downloaded {self.source.step_url(path.name)} | {amount}")]


@dataclass(frozen=True, kw_only=True)
class RunStart:
    """The start of an attempt: its run folder, what to resume from, and its number.

    `uses_remote` says whether the run has a remote store, on every rank. `connection` is None on other ranks than 0,
    and without a remote store.
    """

    folder: str
    resume: str | None
    attempt: int
    uses_remote: bool
    connection: RemoteConnection | None

    @property
    def download(self) -> Callable[[Path], tuple[Path | None, list[Event]]] | None:
        """The function that downloads the checkpoint to resume from, on rank 0 of a run with a remote store."""
        return None if self.connection is None else self.connection.download

    @property
    def events(self) -> tuple[Event, ...]:
        """The events with which rank 0 reports on the remote store."""
        return () if self.connection is None else self.connection.events

    def share_choice(self, setup: TrainingSetup) -> Callable[[Callable[[], Any]], Any] | None:
        """Return the function with which rank 0 may take long to choose a checkpoint; None without a remote store."""
        if not self.uses_remote:
            return None
        return partial(_run_with_heartbeats, setup)

    def open_tier(self, settings: Settings, run: RunFolder, event_bus: EventBus) -> RemoteTier | None:
        """Return the remote tier on rank 0 of a run with a remote store; None elsewhere."""
        if self.connection is None or self.connection.target is None:
            return None
        return RemoteTier(
            self.connection.target,
            run=run.path,
            checkpoints=run.checkpoints,
            keep=settings.checkpoint.remote_keep,
            emit=event_bus.emit,
        )


def choose_start(prepared_job: PreparedJob, world: World) -> RunStart:
    """Return the start of this attempt. Rank 0 chooses for all ranks, after the run folder is locked.

    Raises:
        UsageError: the remote store can't be used with these settings or credentials. Other ranks get a `PeerError`.
        MachineError: the remote store can't be reached. Other ranks get a `PeerError`.
    """
    task, url = prepared_job.task, remote_url(prepared_job.settings)
    resume_url = task.resume if task.resume is not None and is_remote_url(task.resume) else ""
    uses_remote = task.verb == "train" and bool(url or resume_url)
    connection: RemoteConnection | None = None
    problem = None
    if uses_remote and world.is_main:
        try:
            connection = _connect(
                url,
                resume_url,
                run=RunFolder(Path(task.run)),
                is_restart=task.restart is not None,
                has_memory=bool(task.memory_folder and list_checkpoints(Path(task.memory_folder))),
            )
        except PacelineError as error:
            problem = error
    resume = checkpoint_to_resume(task)
    if connection is not None and connection.source is not None and (resume is None or resume_url):
        resume = "newest"
    elif resume_url:
        resume = checkpoint_to_resume(replace(task, resume=None))
    chosen = [task.run, resume, number_attempt(task, world), uses_remote]
    folder, resume, attempt, uses_remote = _share_outcome(world, chosen, problem)
    return RunStart(folder=folder, resume=resume, attempt=attempt, uses_remote=uses_remote, connection=connection)


def run_on_main_rank(world: World, work: Callable[[], T], *, send_heartbeat: Callable[[], object]) -> T:
    """Return on every rank what `work` returns on rank 0. The others wait without a timeout, however long it takes.

    The result must be JSON. Meanwhile, `send_heartbeat` is called on every rank twice a second.

    Raises:
        PacelineError: `work` raised it on rank 0. Other ranks get a `PeerError`.
    """
    outcome: list[Any] = [None, None]

    def run_work() -> None:
        try:
            outcome[0] = work()
        except BaseException as error:  # raised in the main thread below
            outcome[1] = error

    thread = threading.Thread(target=run_work, name="paceline-remote", daemon=True)
    if world.is_main:
        thread.start()
    delay = _POLL_SECONDS[0]
    while world.share_json(thread.is_alive()):
        send_heartbeat()
        if world.is_main:
            thread.join(delay)
        delay = min(2 * delay, _POLL_SECONDS[1])
    result, error = outcome
    if error is not None and not isinstance(error, PacelineError):
        raise error
    shared: T = _share_outcome(world, result, error)
    return shared


def finish_uploads(
    tier: RemoteTier | None, setup: TrainingSetup, *, exit_code: int, report_finished: Callable[[], None]
) -> int:
    """Wait until the last checkpoint is uploaded, on every rank. Return the exit code; 75 if it is not uploaded.

    A signal ends the wait of a completed run. A stopped run waits until it is done, or until it is killed.
    """
    report_finished()
    is_uploaded = run_on_main_rank(
        setup.world,
        lambda: (
            tier is None
            or tier.finish(
                timeout_seconds=setup.settings.checkpoint.remote_timeout,
                is_interrupted=lambda: exit_code == ExitCode.DONE and stop_flag.is_requested,
            )
        ),
        send_heartbeat=report_finished,
    )
    return exit_code if is_uploaded else int(ExitCode.STOPPED)


def _run_with_heartbeats(setup: TrainingSetup, work: Callable[[], T]) -> T:
    """Run `work` with `run_on_main_rank`, before the training loop sends the heartbeats of this rank."""
    heartbeat = open_heartbeat(setup.world.rank, setup.settings)
    if heartbeat is None:
        return run_on_main_rank(setup.world, work, send_heartbeat=lambda: None)
    try:
        return run_on_main_rank(
            setup.world, work, send_heartbeat=lambda: heartbeat.write(step=0, phase=BUSY_PHASES[-1])
        )
    finally:
        heartbeat.close()


def _share_outcome(world: World, result: Any, problem: PacelineError | None) -> Any:
    """Return the result of rank 0 on every rank, or raise an error on every rank: on rank 0 its own.

    Raises:
        PeerError: rank 0 has the error, and reports it.
    """
    result, text = world.share_json([None, str(problem)] if problem is not None else [result, ""])
    if problem is not None:
        raise problem
    if text:
        raise PeerError(f"rank 0 stopped: {text}")
    return result


def _connect(
    url: str, resume_url: str, *, run: RunFolder, is_restart: bool, has_memory: bool = False
) -> RemoteConnection:
    """Open the stores, check them, and fetch the records that a resume on an empty disk needs.

    After a fault, the store is not checked again, and not needed if there are checkpoints in memory, so that a server
    that is away does not keep the run from restarting.
    """
    is_empty = not list_checkpoints(run.checkpoints)
    target, source, step_name = None, None, ""
    events: list[Event] = []
    try:
        if url:
            check_remote_url(url)
            target = RemoteFolder(open_remote_store(f"{url.rstrip('/')}/{_remote_name(run.path)}"))
            if not is_restart:
                events += _check_store(target.store, run, is_empty=is_empty)
            source = target
        if resume_url:
            check_remote_url(resume_url, name="resume")
        if resume_url and is_empty:
            run_url, step_name = _split_resume_url(resume_url)
            source = RemoteFolder(open_remote_store(run_url))
        if is_empty and source is not None:
            try:
                has_candidates = bool(source.list_candidates())
            except RemoteError as error:
                if not (is_restart and has_memory and error.is_temporary):
                    raise
                has_candidates = False
            if has_candidates:
                _fetch_records(source.store, run)
            elif resume_url and not has_memory:
                hint = "the URL of a run, or of a checkpoint in it: --resume s3://bucket/folder/RUN"
                raise UsageError(f"there is no checkpoint in {resume_url}.", hint=hint)
            else:
                source = None
    except RemoteError as error:
        raise error.start_error from None
    return RemoteConnection(target=target, source=source, step_name=step_name, events=tuple(events))


def _check_store(store: RemoteStore, run: RunFolder, *, is_empty: bool) -> list[Event]:
    """Check that the store can be used, and that its folder belongs to this run.

    If the server is away and the disk has checkpoints, the run can start. Return a warning then.
    """
    try:
        store.check_access()
        _claim(store, run, is_empty=is_empty)
    except RemoteError as error:
        if is_empty or not error.is_temporary:
            raise
        return [Note(text=f"{error.what} The run continues from its disk, and uploads later", level="warning")]
    return []


def _claim(store: RemoteStore, run: RunFolder, *, is_empty: bool) -> None:
    """Let the folder in the store belong to this run. A run on another machine with an empty disk takes it over.

    Raises:
        UsageError: it belongs to another run, whose checkpoints would be mixed with those of this one.
    """
    path = run.path / OWNER
    token, content = _read_token(path.read_bytes() if path.is_file() else b"{}"), store.read(_REMOTE_OWNER)
    remote_token = None if content is None else _read_token(content)
    if content is None:
        token = token or secrets.token_hex(8)
        store.write(_REMOTE_OWNER, f'{{"token": "{token}"}}\n'.encode())
    elif token is None and is_empty and remote_token is not None:
        token = remote_token
    elif remote_token is None:
        raise UsageError(
            f"{store.url}/{_REMOTE_OWNER}, which says whose checkpoints these are, is damaged.",
            hint="remove this file if they are of this run; the next start writes it again",
        )
    elif token is None or token != remote_token:
        raise UsageError(
            f"{store.url} has the checkpoints of another run.",
            cause=f"another run folder with the name {run.path.name} uploaded them",
            hint="another --run-dir or --checkpoint.remote; or remove that folder, if you do not need it",
        )
    write_json(path, {"token": token})


def _read_token(content: bytes) -> str | None:
    """Return the token that identifies a run, or None if it can't be read."""
    try:
        token = parse_json(content)["token"]
    except (ValueError, KeyError, TypeError):
        return None
    return token if isinstance(token, str) and re.fullmatch(r"[0-9a-f]{16}", token) else None


def _fetch_records(store: RemoteStore, run: RunFolder) -> None:
    for name in RECORDS:
        content = None if (run.path / name).exists() else store.read(name)
        if content is not None:
            write_text(run.path / name, content.decode(errors="replace"))


def _remote_name(run: Path) -> str:
    """Return the name of the run folder, without characters that have a meaning in URLs."""
    return re.sub(r"[^A-Za-z0-9._=+-]", "-", run.resolve().name)


def _split_resume_url(url: str) -> tuple[str, str]:
    """Return the URL of the run, and the name of the checkpoint, empty for the newest one."""
    run_url, _, name = url.rstrip("/").rpartition("/")
    if parse_step(Path(name)) < 0:
        return url.rstrip("/").removesuffix(f"/{CHECKPOINTS}"), ""
    return run_url.removesuffix(f"/{CHECKPOINTS}"), name
