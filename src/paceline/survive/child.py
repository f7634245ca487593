"""A worker process, from its first line to its exit code."""

import ctypes
import json
import os
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch

from paceline.errors import ExitCode, PacelineError, user_line
from paceline.plugins import resolve
from paceline.survive.failure import current_rank, print_traceback, write_failure
from paceline.survive.signals import stop_flag
from paceline.talk import flush, say

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run_entry(entry: str, payload: Mapping[str, Any], *, threads: int, failures: Path) -> NoReturn:
    """Run `entry(payload)` and leave with its exit code; an exception is written down first."""
    _leave(_guarded(lambda: int(resolve(entry)(payload)), threads=threads, failures=failures))


def run_script(argv: list[str], *, threads: int, failures: Path) -> NoReturn:
    """Run the user's own script as `__main__` and leave as it leaves."""

    def script() -> int:
        sys.argv = list(argv)
        sys.path.insert(0, str(Path(argv[0]).resolve().parent))
        runpy.run_path(argv[0], run_name="__main__")
        return int(ExitCode.DONE)

    _leave(_guarded(script, threads=threads, failures=failures))


def _guarded(body: Callable[[], int], *, threads: int, failures: Path) -> int:
    torch.set_num_threads(threads)
    stop_flag.install()
    _watch_threads(failures)
    try:
        return body()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        if code not in (int(ExitCode.DONE), int(ExitCode.STOPPED)):
            write_failure(failures, rank=current_rank(), error=error)
        return code
    except BaseException as error:
        write_failure(failures, rank=current_rank(), error=error)
        print_traceback(error)
        return int(getattr(error, "exit_code", ExitCode.FAILED))


def _watch_threads(failures: Path) -> None:
    """An exception in a thread is written down too; it does not end the process by itself."""

    def hook(args: threading.ExceptHookArgs) -> None:
        error = args.exc_value or args.exc_type()
        error.__traceback__ = _or_none(args.exc_traceback)
        write_failure(failures, rank=current_rank(), error=error)
        print_traceback(error)

    threading.excepthook = hook


def _or_none(trace: TracebackType | None) -> TracebackType | None:
    return trace


def _leave(code: int) -> NoReturn:
    """Without running other ranks' way down: a destructor may wait for a peer that is gone."""
    flush()
    os._exit(code)


def read_request(path: Path) -> dict[str, Any]:
    """The file that crosses."""
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value


def run_joined(entry: str, payload: Mapping[str, Any], *, threads: int) -> int:
    """Run `entry` in a process that another launcher made; a failure goes to the standard error."""
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    stop_flag.install()
    try:
        return int(resolve(entry)(payload))
    except PacelineError as error:
        say(f"rank {current_rank()}: {error}", sys.stderr)
        os._exit(int(error.exit_code))
    except BaseException as error:
        traceback.print_exception(error)
        line = user_line(error)
        where = f"{line}, " if line else ""
        text = f"FAILED. rank {current_rank()}, {where}{type(error).__name__}: {error}"
        say(text, sys.stderr)
        os._exit(int(ExitCode.FAILED))
