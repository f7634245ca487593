"""The script of a `pl.Run`: how it was started, how its ranks start it again, and what they take over of its task."""

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
from paceline.launch.environments import JoinedWorld
from paceline.launch.launcher import CHOSEN_KERNELS, EXACT_KERNELS, too_late
from paceline.planner.layout.execution_plan import Resources, settle_threads
from paceline.planner.layout.host_resources import usable_cores
from paceline.run_folder.run_folder import run_of

CROSSING = ("run", "attempt", "resume")  # of the task, from the script that starts the ranks to these
CHOSEN = ("layout", "settings", "origins", "options")  # where the layout is auto


def script_to_start(*, ranks: int) -> list[str]:
    """What a worker runs as `__main__`: the file and its words, or `-m`, a module and its words.

    Raises:
        UsageError: it came through the standard input or `python -c`, or is a notebook.
    """
    main = sys.modules["__main__"]
    spec: ModuleSpec | None = getattr(main, "__spec__", None)
    if spec is not None and spec.name != "__main__":
        return ["-m", spec.name, *sys.argv[1:]]
    place = Path(getattr(main, "__file__", None) or "")  # absolute, wherever the script has gone since
    if spec is not None:  # a folder or an archive with a __main__.py
        place = place.parent
    if place == Path() or sys.argv[0] in ("", "-", "-c") or not place.exists():
        why = f"ranks={ranks} starts the script again in each rank" if ranks > 1 else "train.exact starts it again"
        raise UsageError(
            "this script is no file, so it can't be started again.",
            cause=f"{why}; it came through the standard input or python -c, or is a notebook",
            hint="save it as mine.py: python mine.py" + ("; ranks=1 works as it is" if ranks > 1 else ""),
        )
    return [str(place.resolve()), *sys.argv[1:]]


def begin_again(*, was_open: bool) -> NoReturn:
    """Replace this process by itself, with exact mode's kernels: the same words and number, which no launcher sees.

    Raises:
        UsageError: what it did so far, as a run that `was_open`, can't be done again.
    """
    script = sys.argv[0]
    if was_open or (dist.is_available() and dist.is_initialized()):
        raise too_late("this process has had a run or a process group of its own before")
    if not sys.executable or not script or (script != "-c" and not Path(script).exists()):
        raise too_late("the program can't be started again: it was read from a pipe, or its folder was left")
    if "mpi4py.MPI" in sys.modules:
        raise too_late("mpi4py has begun MPI in this process, so it can't be started again")
    flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, EXACT_KERNELS: CHOSEN_KERNELS})


def change_to_go_on(folder: Path, *, resume: str | None, is_named: bool) -> str:
    """What the script says otherwise of its `pl.Run`, that goes on in `folder` and not back to a checkpoint there."""
    start = Path(resume or "")
    goes_back = start.name.startswith("step-") and run_of(start).path.resolve() == folder.resolve()
    if is_named and not goes_back:
        return ""
    return f"run_dir={str(folder)!r}" + (", resume=False" if goes_back else "")


def script_again(joined: JoinedWorld | None, *, words: Sequence[str], change: str) -> str:
    """The script's own command line; with `change`, what to write into it to go on, and begin nothing anew."""
    if joined is not None and joined.kind == "torchrun":
        words = [word for word in words[1:] if word != "-u"]  # which torchrun has put there
    line = shlex.join([*(joined.launcher if joined is not None else []), *words])
    return f"{line}, with pl.Run(..., {change})" if change else line


def processes_of(task: Task) -> int:
    """How many make its ranks."""
    return parse_layout(task.layout).processes(ranks=task.ranks)


def threads_of(task: Task, *, exact: bool) -> int:
    """Of one rank."""
    cluster = Resources(ranks=task.ranks, cores=usable_cores())
    return settle_threads(cluster=cluster, one=exact, asked=task.settings.get("train.threads"))
