"""`pl.Run`: the loop in the user's own hands, the same file under python, torchrun and srun."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import ExitCode, UsageError
from paceline.events import EvalDone
from paceline.feed.types import StepInput
from paceline.job import Job
from paceline.launch.environments import detect
from paceline.launch.meet import adopt
from paceline.plan.machine import usable_cores, visible_gpus
from paceline.plan.settle import Cluster, settle_threads
from paceline.spec.layout import parse_layout
from paceline.spec.read import Asked, merge
from paceline.spec.task import Task
from paceline.start import EXACT_KERNELS, Request, failure_screen, start
from paceline.step.generate import generate
from paceline.step.result import StepResult
from paceline.store.disk import read_json
from paceline.store.hold import Hold, hold
from paceline.store.runs import RunFolder, choose_run, new_run
from paceline.survive.signals import stop_flag
from paceline.talk import say
from paceline.train.ready import Ready, join_world, prepare
from paceline.train.session import Session
from paceline.watch.console import Tail
from paceline.world import World


class Run:
    """A run of `job`. Started by plain Python with `ranks > 1`, the script starts again as that many workers.

    `settings` are dotted names: `Run(job, ranks=2, settings={"train.steps": 100})`.
    """

    def __init__(
        self,
        job: Job,
        *,
        layout: str | None = None,
        ranks: int | None = None,
        device: str = "auto",
        run_dir: str | Path | None = None,
        resume: str | Path | bool = False,
        allow: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.job = job
        self.exit_code = int(ExitCode.DONE)
        self._session: Session | None = None
        kind = ("cuda" if visible_gpus() else "cpu") if device == "auto" else device
        asked = parse_layout(layout) if layout is not None else None
        count = ranks or (asked and asked.replicas) or _world_size() or (visible_gpus() if kind == "cuda" else 1) or 1
        script = Path(sys.argv[0]).stem or "run"
        self._task = Task(
            verb="train",
            job=job.name or script,
            layout=layout or ("single" if count == 1 else "ddp"),
            ranks=count,
            device=kind,
            run=str(run_dir or ""),
            resume=str(resume) if isinstance(resume, str | Path) else ("" if resume else None),
            allow=tuple(allow),
            settings=dict(settings or {}),
            origins=dict.fromkeys(settings or {}, "Run(settings=)"),
        )
        merge(Asked(values=self._task.settings, origins=self._task.origins))

    @classmethod
    def worker(cls, task: Task) -> Self:
        """A run inside a worker that the command started."""
        run = cls.__new__(cls)
        run._task = task
        run._session = None
        run.exit_code = int(ExitCode.DONE)
        run._ready = prepare(task)
        run.job = run._ready.job
        return run

    _ready: Ready | None = None
    _hold: Hold | None = None

    def open(self) -> Session:
        """Join the others, and give what is behind this run; whoever asks also closes it."""
        self.__enter__()
        return self._live

    def __enter__(self) -> Self:
        self._join_or_start()
        ready = self._ready or prepare(self._task, job=self.job)
        world = join_world(ready)
        self._hold = held_folder(ready.task, world=world)
        try:
            self._session = Session(ready, world=world, target=self)
        except BaseException:
            self._let_go()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._leave(error)
        finally:
            self._let_go()

    def _leave(self, error: BaseException | None) -> None:
        session = self._live
        if error is None:
            self.exit_code = session.finish()
            session.close()
            if self.exit_code and self._ready is None:
                sys.exit(self.exit_code)
        elif session.world.world_size == 1:
            session.close()

    def batches(self) -> Iterator[StepInput]:
        """This replica's share of each global batch, until the run is over or asked to stop."""
        return self._live.loop.batches()

    def step(self, batch: StepInput) -> StepResult:
        """Forward, backward, reduce, clip, update; log, evaluate and save when it is time."""
        return self._live.loop.step(batch)

    def evaluate(self, *, split: str = "eval") -> EvalDone:
        """Exact metrics of the present weights; every rank calls this."""
        return self._live.loop.evaluate(split=split)

    def save(self) -> None:
        """Save now; every rank calls this."""
        self._live.loop.save()

    def stop(self) -> None:
        """End after this step, saved; every rank calls this."""
        self._live.loop.request_stop()

    def generate(self, prompt: Tensor, *, num_tokens: int, **options: Any) -> Tensor:
        """Continue token ids `[batch, length]`; every rank calls this and gets the same."""
        return generate(self.model, prompt.to(self._live.world.device), num_tokens=num_tokens, **options)

    @property
    def model(self) -> nn.Module:
        """The user's own module."""
        return self._live.built.model

    @property
    def optimizers(self) -> list[Optimizer]:
        """The job's own optimizers, as its factory made them."""
        return self._live.built.update.optimizers

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._live.run.path

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._live.world.rank

    @property
    def _live(self) -> Session:
        if self._session is None:
            raise RuntimeError("use a Run inside `with pl.Run(job) as run:`")
        return self._session

    def _let_go(self) -> None:
        if self._hold is not None:
            self._hold.close()

    def _join_or_start(self) -> None:
        """In a worker, or one process: go on. In a plain process with several ranks: start them and leave.

        So also in exact mode: its kernels are chosen by a variable that is read before torch is there.
        """
        if self._ready is not None:
            return
        folder = os.environ.get("PACELINE_ATTEMPT_FOLDER")
        if folder:
            given = read_json(Path(folder) / "request.json")["payload"]
            self._task = Task.from_json({**self._task.as_json(), **{n: given[n] for n in ("run", "attempt", "resume")}})
            return
        joined = detect(os.environ)
        if joined is not None:
            adopt(joined, os.environ)
        self._task = with_folder(self._task, make=joined is None or joined.rank == 0)
        exact = bool(self._task.settings.get("train.exact"))
        if joined is not None or (self._processes == 1 and not (exact and EXACT_KERNELS not in os.environ)):
            if exact or self._processes < self._task.ranks:
                torch.set_num_threads(self._threads)
            stop_flag.install()
            return
        sys.exit(self._start_again())

    @property
    def _processes(self) -> int:
        return parse_layout(self._task.layout).processes(ranks=self._task.ranks)

    @property
    def _threads(self) -> int:
        asked = self._task.settings.get("train.threads")
        cluster = Cluster(ranks=self._task.ranks, cores=usable_cores())
        return settle_threads(cluster=cluster, one=bool(self._task.settings.get("train.exact")), asked=asked)

    def _start_again(self) -> int:
        task = self._task
        tails: list[Tail] = []

        def follow(folder: Path) -> Tail:
            tails.append(Tail(folder))
            return tails[-1]

        request = Request(
            ranks=self._processes,
            run=RunFolder(Path(task.run)),
            script=[str(Path(sys.argv[0]).resolve()), *sys.argv[1:]],
            payload=task.as_json(),
            threads=self._threads,
            exact=bool(task.settings.get("train.exact")),
        )
        outcome = start(request, on_start=follow)
        tails[-1].close()
        if outcome.failure is not None:
            say(failure_screen(outcome), sys.stderr)
        return outcome.exit_code


def held_folder(task: Task, *, world: World) -> Hold | None:
    """Rank 0 takes the run folder; where our own launcher started it, that one has it already.

    Raises:
        UsageError: another run writes there; on every rank alike.
    """
    found, problem = None, None
    if world.is_main and "PACELINE_ATTEMPT_FOLDER" not in os.environ:
        try:
            found = hold(Path(task.run), wait=say)
        except UsageError as error:
            problem = error.as_json()
    problem = world.share_json(problem)
    if problem is not None:
        raise UsageError(problem["what"], cause=problem["cause"], hint=problem["hint"])
    return found


def with_folder(task: Task, *, make: bool = True) -> Task:
    """The task with a run folder, and what to go on from. In a world that others made rank 0 knows, and tells."""
    if not make:
        return task
    name = Path(task.job.partition(":")[0]).stem
    run, start = choose_run(name, run=task.run, resume=task.resume)
    run = run or new_run(name)
    run.path.mkdir(parents=True, exist_ok=True)
    return replace(task, run=str(run.path), resume=start)


def _world_size() -> int | None:
    joined = detect(os.environ)
    return joined.world_size if joined else None
