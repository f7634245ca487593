"""Run a foreign training command with the recorder in it, until its ranks have made enough steps or it ends."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from paceline.launch.agent.signals import is_main_thread
from paceline.script_check.recording import (
    CHECKER_VARIABLE,
    EVERY_VARIABLE,
    FEED_VARIABLE,
    FOLDER_VARIABLE,
    KEEP_VARIABLE,
    SEED_VARIABLE,
    STEPS_VARIABLE,
    ScriptRecording,
    write_origin,
)

OUTPUT_FILE = "output.log"
_INJECTED = Path(__file__).parent / "injected"
_POLL_SECONDS = 0.1
_END_SECONDS = 5.0  # for a command that was asked to end


@dataclass(frozen=True, kw_only=True)
class ScriptEnd:
    """The end of a command. `is_out_of_time`: it was ended, because it made no step for too long."""

    exit_code: int
    is_out_of_time: bool
    output: Path


def run_recorded(
    origin: ScriptRecording,
    *,
    folder: Path,
    wait_seconds: float,
    environ: Mapping[str, str],
    report: Callable[[str], None],
) -> ScriptEnd:
    """Run a command whose Python processes record into `folder`, and end when an optimizer has made enough steps.

    What the command prints goes to a file there. If no line is recorded for `wait_seconds`, the command is ended.

    Raises:
        FileNotFoundError, PermissionError: the command can't be started.
    """
    write_origin(folder, origin)
    output = folder / OUTPUT_FILE
    path = os.pathsep.join([str(_INJECTED), *filter(None, [environ.get("PYTHONPATH", "")])])
    own = {
        FOLDER_VARIABLE: str(folder.resolve()),
        STEPS_VARIABLE: str(origin.steps),
        EVERY_VARIABLE: str(origin.every),
        CHECKER_VARIABLE: str(os.getpid()),
        SEED_VARIABLE: "" if origin.seed is None else str(origin.seed),
        KEEP_VARIABLE: "1" if origin.has_batches else "",
        FEED_VARIABLE: str(Path(origin.fed).resolve()) if origin.fed else "",
        "PYTHONPATH": path,
    }
    if origin.seed is not None:
        own["PYTHONHASHSEED"] = str(origin.seed)
    process = None
    with _termination_as_exit(), output.open("wb") as stream:
        try:
            process = subprocess.Popen(
                origin.command, env={**environ, **own}, start_new_session=True,
                stdout=stream, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            )  # fmt: skip
            is_out_of_time = _wait(process, folder, wait_seconds=wait_seconds, report=report)
        finally:
            _end(process, folder)
    return ScriptEnd(exit_code=process.returncode, is_out_of_time=is_out_of_time, output=output)


def _wait(
    process: "subprocess.Popen[bytes]", folder: Path, *, wait_seconds: float, report: Callable[[str], None]
) -> bool:
    """Wait for the end of the command. Return whether nothing was recorded for too long."""
    size, since, is_recording = -1, time.monotonic(), False
    while process.poll() is None:
        files = list(folder.glob("rank-*.jsonl"))
        if files and not is_recording:
            is_recording = True
            report(f"recording, after {time.monotonic() - since:.0f} s")
        now = sum(file.stat().st_size for file in files)
        if now != size:
            size, since = now, time.monotonic()
        if time.monotonic() - since > wait_seconds:
            return True
        time.sleep(_POLL_SECONDS)
    return False


def recorded_processes(folder: Path) -> list[psutil.Process]:
    """Return the processes that record into a folder, also those with a session of their own, as torchrun's workers."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(FOLDER_VARIABLE) == str(folder.resolve()):
                found.append(process)
    return found


def _end(process: "subprocess.Popen[bytes] | None", folder: Path) -> None:
    """End the command and all processes that it has started, and wait for it; None if a signal came as it started."""
    if process is not None and process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS)
    left = recorded_processes(folder)
    for each in left:
        with suppress(psutil.Error):
            each.kill()
    if process is not None:
        process.wait()
    psutil.wait_procs([each for each in left if process is None or each.pid != process.pid], timeout=_END_SECONDS)


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Return a context in which SIGTERM ends this process as an exception does, so that the command is ended first."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave) if is_main_thread() else None
    try:
        yield
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)


def describe_command(command: Sequence[str]) -> str:
    """Return the command as a person types it, without the path of this Python."""
    return " ".join("python" if word == sys.executable else word for word in command)
