"""The script of a `pl.Run`: its command line, its restart in the ranks, and the task fields that the ranks inherit."""

import os
import shlex
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from paceline.config.layout import parse_layout
from paceline.config.task import Task
from paceline.console.output import flush
from paceline.errors import UsageError
from paceline.launch.launch_environment import DEFAULT_EXACT_KERNELS, KERNELS_VARIABLE, torch_imported_error
from paceline.launch.launcher_variables import JoinedWorld
from paceline.planner.layout.execution_plan import Resources, choose_threads
from paceline.planner.layout.host_resources import usable_cores
from paceline.run_folder.run_folder import run_of_checkpoint

INHERITED_FIELDS = (
    "run",
    "attempt",
    "resume",
    "restart",
    "memory_folder",
    "peer_plan",
)  # task fields that the ranks inherit from the script that starts them
AUTO_LAYOUT_FIELDS = ("layout", "settings", "origins", "options")  # further fields, if the layout is auto


def restart_arguments(*, ranks: int) -> list[str]:
    """Return the arguments that start the script again: a file and its arguments, or `-m`, a module and its arguments.

    Raises:
        UsageError: the script came from standard input or `python -c`, or is a notebook.
    """
    main = sys.modules["__main__"]
    spec: ModuleSpec | None = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return ["-m", spec.name, *sys.argv[1:]]
    path = Path(getattr(main, "__file__", None) or "")  # absolute, so a later change of directory does not matter
    if spec is not None:  # a folder or an archive with a __main__.py
        path = path.parent
    if path == Path() or sys.argv[0] in ("", "-", "-c") or not path.exists():
        reason = f"ranks={ranks} restarts the script in each rank" if ranks > 1 else "train.exact restarts it"
        raise UsageError(
            "this script is not a file, so it can't be restarted.",
            cause=f"{reason}; it came from standard input or python -c, or it is a notebook",
            hint="save it as mine.py: python mine.py" + ("; ranks=1 works without a file" if ranks > 1 else ""),
        )
    return [str(path.resolve()), *sys.argv[1:]]


def restart_in_exact_mode(*, had_run: bool) -> NoReturn:
    """Replace this process by the same command in exact mode. The process id stays the same, so no launcher notices.

    Raises:
        UsageError: the process can't be restarted: it already had a run (`had_run`), a process group or an initialised
            MPI, or its script is not found.
    """
    script = sys.argv[0]
    if had_run or (dist.is_available() and dist.is_initialized()):
        raise torch_imported_error("this process already had a run or a process group")
    if not sys.executable or not script or (script != "-c" and not Path(script).exists()):
        raise torch_imported_error(
            "the program can't be restarted: it was read from a pipe, or its file is not found from the current folder"
        )
    if "mpi4py.MPI" in sys.modules:
        raise torch_imported_error("mpi4py has initialised MPI in this process, so it can't be restarted")
    flush()
    os.execve(
        sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, KERNELS_VARIABLE: DEFAULT_EXACT_KERNELS}
    )


def resume_arguments(folder: Path, *, resume: str | None, has_run_dir: bool) -> str:
    """Return the `pl.Run` arguments to change so that the script resumes the run in `folder`.

    `has_run_dir`: the script sets the run folder itself. An argument that resumes from an older checkpoint of the run
    must change too.
    """
    checkpoint = Path(resume or "")
    is_older_checkpoint = (
        checkpoint.name.startswith("step-") and run_of_checkpoint(checkpoint).path.resolve() == folder.resolve()
    )
    if has_run_dir and not is_older_checkpoint:
        return ""
    return f"run_dir={str(folder)!r}" + (", resume=False" if is_older_checkpoint else "")


def script_command(launcher: JoinedWorld | None, *, command: Sequence[str], change: str) -> str:
    """Return the command line of the script. `change` is the edit of the script that makes it resume the run."""
    if launcher is not None and launcher.kind == "torchrun":
        command = [word for word in command[1:] if word != "-u"]  # torchrun adds -u
    line = shlex.join(command) if launcher is None else launcher.launch_command(command)
    return f"{line}, with pl.Run(..., {change})" if change else line


def count_processes(task: Task) -> int:
    """Return how many processes run the ranks of a task."""
    return parse_layout(task.layout).processes(ranks=task.ranks)


def count_threads(task: Task, *, exact: bool) -> int:
    """Return how many threads each rank uses."""
    cluster = Resources(ranks=task.ranks, cores=usable_cores())
    return choose_threads(resources=cluster, one_thread=exact, requested=task.settings.get("train.threads"))
