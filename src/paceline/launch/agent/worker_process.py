"""The main function of a worker process: it runs the job's entry or script and exits with its exit code."""

import os
import runpy
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from paceline.config.job_reference import split_jobref
from paceline.errors import ExitCode, PacelineError, job_exit_error
from paceline.launch.agent.launcher_death import die_with_launcher
from paceline.launch.agent.malloc_settings import configure_malloc
from paceline.launch.agent.process_exit import end_python, exit_now, run_finish
from paceline.launch.agent.rank_activity import activity_path, activity_reporter
from paceline.launch.agent.shared_status import read_stop, write_end
from paceline.launch.agent.signals import stop_flag
from paceline.launch.failures.failure_record import current_rank, print_traceback, write_failure
from paceline.launch.failures.stack_dumps import install_crash_handler, install_stack_handler
from paceline.launch.inherited_environment import NODES, own_environ
from paceline.launch.joined_rank import joined_rank
from paceline.nodes.rank_hints import hint_for_nodes
from paceline.plugins import resolve
from paceline.user_code import script_arguments

_VERBS_WITH_LOOP = ("train", "compare")


def worker_main(request: Mapping[str, Any], *, folder: Path, status_fd: int | None) -> NoReturn:
    """Run the entry with its payload, or the user's script, and exit with its exit code.

    An exception is recorded before the exit. If the entry returns, its exit code is written to the shared status
    buffer (`status_fd`), because the code of a process that exits through `os._exit` or a C library says nothing about
    the run. A process that the job forked may return to this function too, and writes neither of them.
    """
    argv: list[str] = request.get("script") or []
    rank, pid = current_rank(), os.getpid()

    def run_job() -> int:
        return _run_script(argv) if argv else _run_entry(request["entry"], request["payload"])

    def record_failure(error: BaseException) -> None:
        word_error_of_rank(error)
        if os.getpid() == pid:
            write_failure(folder, rank=rank, error=error, status_fd=status_fd)

    if status_fd is not None:
        install_stack_handler(status_fd)
        install_crash_handler()
        activity_reporter.start(activity_path(folder, rank))
    poll_stop_request = None if status_fd is None else partial(read_stop, status_fd, rank=rank)
    code, is_completed = _run_guarded(
        run_job, threads=int(request["threads"]), record_failure=record_failure, poll_stop_request=poll_stop_request
    )
    if not is_completed:
        exit_now(code)
    if status_fd is not None and os.getpid() == pid:
        write_end(status_fd, rank=rank, code=code)
    end_python(code)


def word_error_of_rank(error: BaseException) -> None:
    """Change the hint of an error of this rank if Paceline has started it on one of several nodes."""
    nodes = own_environ(os.environ).get(NODES)
    if nodes and isinstance(error, PacelineError):
        error.hint = hint_for_nodes(error.hint, nodes=nodes)


def _run_entry(entry: str, payload: Mapping[str, Any]) -> int:
    """Run the entry and return its exit code. An entry must not call `sys.exit`; a script may."""
    job = payload.get("job")
    try:
        with script_arguments(split_jobref(job)[0] if isinstance(job, str) else entry):
            return int(resolve(entry)(payload))
    except SystemExit as error:
        raise job_exit_error(error) from error


def _run_script(argv: list[str]) -> int:
    """Run the user's script or module as `__main__`."""
    is_module = argv[0] == "-m"
    sys.argv = list(argv[1:] if is_module else argv)
    sys.path.insert(0, str(Path.cwd() if is_module else Path(argv[0]).resolve().parent))
    if is_module:
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(argv[0], run_name="__main__")
    return int(ExitCode.DONE)


def _run_guarded(
    run_job: Callable[[], int],
    *,
    threads: int,
    record_failure: Callable[[BaseException], None],
    poll_stop_request: Callable[[], bool] | None = None,
) -> tuple[int, bool]:
    """Return the exit code, and whether `run_job` completed.

    It completed if it returned, or if a script exited with code 0 or with the code of its finished `pl.Run`.
    """
    torch.set_num_threads(threads)
    configure_malloc(os.environ)
    stop_flag.install(poll_stop_request=poll_stop_request)
    _install_thread_hook(record_failure)
    try:
        return run_job(), True
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(bool(error.code))
        if code in (int(ExitCode.DONE), run_finish.code):
            return code, True
        record_failure(job_exit_error(error) if code == ExitCode.STOPPED else error)
        return code, False
    except BaseException as error:
        record_failure(error)
        print_traceback(error)
        return int(getattr(error, "exit_code", ExitCode.FAILED)), False


def _install_thread_hook(record_failure: Callable[[BaseException], None]) -> None:
    """Install an excepthook for threads that records and prints the exception; the process continues."""

    def hook(args: threading.ExceptHookArgs) -> None:
        error = (args.exc_value or args.exc_type()).with_traceback(args.exc_traceback)
        record_failure(error)
        print_traceback(error)

    threading.excepthook = hook


@dataclass(frozen=True, kw_only=True)
class JoinedOutcome:
    """The result of an entry in a process that another launcher started; `error` is the exception that ended it."""

    code: int
    error: BaseException | None = None


def run_joined(entry: str, payload: Mapping[str, Any], *, threads: int) -> JoinedOutcome:
    """Run `entry` in a process that another launcher started."""
    die_with_launcher(os.environ)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    torch.set_num_threads(threads)
    configure_malloc(os.environ)
    if payload.get("verb") in _VERBS_WITH_LOOP:  # a signal ends the other verbs at once
        stop_flag.install()
    joined_rank.redirects_output = True
    try:
        return JoinedOutcome(code=_run_entry(entry, payload))
    except BaseException as error:
        return JoinedOutcome(code=int(getattr(error, "exit_code", ExitCode.FAILED)), error=error)
    finally:
        joined_rank.redirects_output = False
