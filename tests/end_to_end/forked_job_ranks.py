"""Train a job for two steps on a few forked processes, without starting an interpreter for each."""

import multiprocessing
import os
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from paceline.comm.process_group import LaunchInfo, World
from paceline.config.task import Task
from paceline.console import output as talk
from paceline.data.order.cursor import Cursor
from paceline.errors import ExitCode, PacelineError
from paceline.job import Job
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.trainer.setup.prepare import prepare
from paceline.verification.compare_in_lockstep import build_layout_loader

_FORK = multiprocessing.get_context("fork")  # torch is imported once, by the one that forks
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Told:
    """What the first process to end said; `state` is `refused`, `failed`, `raw`, `done` or `hung`."""

    state: str
    text: str = ""
    at: float = 0.0


def nothing(built: TrainingSetup) -> None:
    """All is seen."""


def try_pair(
    task: Task,
    *,
    make: Callable[[], Job],
    folder: Path,
    seconds: float = 60.0,
    then: Callable[[TrainingSetup], None] = nothing,
) -> Told:
    """Prepare, build and step twice on `task.ranks` processes that stand in `folder`, and look at what they have."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes: list[Connection] = []
    processes = []
    for rank in range(task.ranks):
        here, there = _FORK.Pipe()
        process = _FORK.Process(target=_serve, args=(there, rank, port, task, make, folder, then), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    until, found = time.monotonic() + seconds, list[Told]()
    for pipe in pipes:
        try:
            found.append(pipe.recv() if pipe.poll(max(0.0, until - time.monotonic())) else Told(state="hung", at=until))
        except EOFError:
            found.append(Told(state="raw", text="the process died", at=time.monotonic()))
        if found[-1].state != "done":
            until = min(until, time.monotonic() + _GRACE_SECONDS)
    for process in processes:
        process.kill()
        process.join()
    return min((told for told in found if told.state != "done"), key=lambda told: told.at, default=found[0])


def _serve(
    pipe: Connection,
    rank: int,
    port: int,
    task: Task,
    make: Callable[[], Job],
    folder: Path,
    then: Callable[[TrainingSetup], None],
) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a user's own, such as torch.jit's
    talk.print_line = lambda *_, **__: None  # type: ignore[assignment]
    with Path(os.devnull).open("w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    os.chdir(folder)
    place = LaunchInfo(rank=rank, world_size=task.ranks, local_rank=rank, port=port)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(task.ranks)}
    told = Told(state="done")
    try:
        ready = prepare(task, job=make())
        world = World.join(launch_info=place, device_type="cpu", backend="gloo", timeout_seconds=30.0)
        built = build_training_setup(job=ready.job, settings=ready.settings, plan=ready.plan, world=world)
        for given, _ in zip(build_layout_loader(built, Cursor()), range(2), strict=False):
            built.step.run(given)
        then(built)
    except PacelineError as error:
        told = Told(state="refused" if error.exit_code == ExitCode.REFUSED else "failed", text=str(error))
    except BaseException as error:
        told = Told(state="raw", text=f"{type(error).__name__}: {error}")
    pipe.send(Told(state=told.state, text=told.text, at=time.monotonic()))
    time.sleep(0.2)  # the others hear of it from their own pipe first
    os._exit(0)
