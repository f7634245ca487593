"""Timing of layouts on the ranks of the run: they execute its step, on a model that may have fewer blocks."""

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from statistics import fmean
from typing import Any

import torch
from torch import nn

from paceline.comm.collective_errors import all_arrived_within
from paceline.comm.process_group import LaunchInfo, World
from paceline.data.types import StepInput
from paceline.errors import DataError, JobError, PacelineError, as_refused
from paceline.job import Job
from paceline.launch.failures.oom_detection import is_out_of_memory
from paceline.measured_planning.profile.truncated_model import truncate_block_lists
from paceline.measured_planning.timing.timing_summary import summarize_timings
from paceline.parallel.initialization.pretrained import PretrainedModel
from paceline.planner.cost.estimate import MeasuredTime
from paceline.planner.search.shortlist import RejectedLayout, TimingTrial
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.trainer.setup.job_data import cut_for, feed_for
from paceline.trainer.setup.prepare import PreparedJob, make_plan

Clock = Callable[[], float]
_ROOM = 0.5  # share of a rank's memory that the layouts timed together may use
_BUILD_SHARE = 0.5  # share of the time limit for building the layouts
_OVER = 2  # times the time limit: after it, no group of layouts is started
_VISIT_SECONDS, _MOST_A_VISIT = 0.15, 5
_LONG = 0.2  # seconds: a longer step does not depend on warm caches
_ON_END = 4  # on several machines, because pipeline stages overlap two steps
_FEW, _MORE = 12, 3  # a deep model is timed with 1/12 and with 1/3 of its blocks
_FAR = (4.0, 2.5)  # times the fastest step: a layout with a slower first or second step gets no more
_SOON, _MANY = 2 / 3, 24  # timing may end after this share of the limit, if all remaining layouts have this many steps
_HOPELESS = (1.8, 1.5, 1.4, 1.3, 1.2)  # times the fastest, by rounds: a slower layout gets no more turns
_LIKELY = 1.2  # times the best forecast of the others: a slow layout below it gets a second turn


@dataclass(kw_only=True)
class _Trial:
    """A layout at one depth, ready to step; `seconds` are this rank's counted steps since `start_time`."""

    candidate: str
    blocks: int
    built: TrainingSetup
    batches: Iterator[StepInput]
    said: float = 0.0
    usual: float = 0.0
    since: float = 0.0
    seconds: list[float] = field(default_factory=list)
    clock: Clock

    def step(self) -> float:
        """Read a batch, run a step on it, and return the seconds of both."""
        began = self.clock()
        self.built.step.run(next(self.batches))
        if self.built.world.device.type == "cuda":
            torch.cuda.synchronize(self.built.world.device)
        return self.clock() - began

    def begin(self, quickest: float) -> None:
        """Run warm-up steps and the first counted ones; a layout far slower than `fastest` gets a single step."""
        for far in _FAR:
            self.since = self.clock()
            self.usual = self.step()
            if self.built.world.share_json(self.usual > far * quickest):
                self.seconds = [self.usual]
                return
        self.since = self.clock()
        self.visit()

    def visit(self) -> None:
        """Run some counted steps, as many on every rank; before short steps, an uncounted one warms the caches."""
        place, share = LaunchInfo.read(os.environ), self.built.world.share_json
        if place.local_world_size < place.world_size:
            self.step()
            self.usual = fmean(self.step() for _ in range(_ON_END))
            self.seconds.append(self.usual)
            return
        if share(self.usual < _LONG):
            self.usual = self.step()
        more = min(_MOST_A_VISIT, max(1, round(_VISIT_SECONDS / self.usual)))
        self.seconds += [self.step() for _ in range(int(share(more)))]

    def close(self) -> None:
        """Free the model."""
        self.built.close()
        del self.built, self.batches


def time_layouts(
    ready: PreparedJob, tries: Sequence[TimingTrial], *, depths: Sequence[int], world: World, seconds: float,
    clock: Clock = time.perf_counter,
) -> dict[str, MeasuredTime | RejectedLayout]:  # fmt: skip
    """Return each candidate's step time by the `clock`, or the reason for its refusal. Every rank calls this.

    `depths` are the lengths of the model's lists of equal blocks, empty if they can't be truncated. As many layouts as
    fit in memory together take turns, so that a disturbance of the machine affects all of them. They are built in their
    order; a layout that is not ready within its share of `seconds` is omitted. Timing ends early if steps are short.

    Raises:
        JobError: the job's own code fails with every layout.
    """
    found: dict[str, MeasuredTime | RejectedLayout] = {}
    began, groups = clock(), list(_groups(tries))
    for group in groups:
        if found and world.share_json(clock() - began > _OVER * seconds):
            break
        found |= _timed_together(ready, group, depths, world=world, seconds=seconds / len(groups), clock=clock)
    own = [one for one in found.values() if isinstance(one, RejectedLayout) and one.is_job_error]
    if own and len(own) == len(found):
        raise JobError(
            f"none of {len(own)} layouts can be timed with any of the microbatch sizes tried: {own[0].reason}",
            cause="the job's own code raises it on every rank, with real values only",
            hint="fix that line; if only one size is refused, set another --train.micro_batch_size",
        )
    return found


def _groups(tries: Sequence[TimingTrial]) -> Iterator[list[TimingTrial]]:
    """Yield groups of trials that fit in memory together: their memory between steps, and the peak of one step."""
    group: list[TimingTrial] = []
    for one in tries:
        wider = [*group, one]
        if group and sum(each.stays for each in wider) + max(each.share - each.stays for each in wider) > _ROOM:
            yield group
            wider = [one]
        group = wider
    if group:
        yield group


def _timed_together(
    ready: PreparedJob,
    tries: Sequence[TimingTrial],
    depths: Sequence[int],
    *,
    world: World,
    seconds: float,
    clock: Clock,
) -> dict[str, MeasuredTime | RejectedLayout]:
    began, trials = clock(), list[_Trial]()
    epoch = time.time() - began  # the clock's zero, as time of day
    errors: dict[str, MeasuredTime | RejectedLayout] = {}
    for one in tries:
        if trials and world.share_json(clock() - began > _BUILD_SHARE * seconds):
            break
        try:
            trials += list(
                _made(ready, one, depths, world=world, before=trials, clock=clock)
            )  # both depths are built, or neither
        except DataError:  # the error of one rank, independent of the layout
            raise
        except PacelineError as error:  # every rank raises the same error
            errors[one.candidate] = RejectedLayout(reason=error.what)
        except Exception as error:
            errors[one.candidate] = _refused(error, one.candidate, world)
    soon, ends = began + _SOON * seconds, began + seconds
    errors |= _take_turns(trials, depths, world=world, soon=soon, ends=ends, clock=clock)
    kept = [trial for trial in trials if trial.candidate not in errors]
    every = world.gather_json([trial.seconds for trial in kept])
    steps = [[max(step) for step in zip(*of_ranks, strict=True)] for of_ranks in zip(*every, strict=True)]
    looked = [(trial.candidate, trial.blocks, own) for trial, own in zip(kept, steps, strict=True)]
    since, until = {trial.candidate: epoch + trial.since for trial in reversed(trials)}, epoch + clock()
    for trial in trials:  # not after an error: other ranks would see closed connections before its message
        trial.close()
    gc.collect()
    found = summarize_timings(looked, depths)
    return {name: replace(one, between=(since[name], until)) for name, one in found.items()} | errors


def _refused(error: Exception, candidate: str, world: World) -> RejectedLayout:
    """Return an error in a layout's steps as its rejection, if every rank has raised it.

    Otherwise raise it, also if it is independent of the layout: data that can't be read, or memory that ran out.
    """
    if isinstance(error, DataError) or is_out_of_memory(error) or not all_arrived_within(world, candidate):
        raise error
    return RejectedLayout(reason=as_refused(error), is_job_error=True)


def _take_turns(
    trials: Sequence[_Trial], depths: Sequence[int], *, world: World, soon: float, ends: float, clock: Clock
) -> dict[str, MeasuredTime | RejectedLayout]:
    """Time the trials in rounds, until the time is over or there are enough steps.

    A trial that is much slower than the fastest gets no more turns, unless all others have enough steps. If only its
    first turn was slow, and its forecast is close to the best, it gets another turn: the machine may have been busy. A
    trial that fails in a later step is reported as rejected.
    """
    refused: dict[str, MeasuredTime | RejectedLayout] = {}
    for visits in count():
        trials = [trial for trial in trials if trial.candidate not in refused]
        found = summarize_timings([(trial.candidate, trial.blocks, trial.seconds) for trial in trials], depths)
        quickest = min((one.seconds for one in found.values()), default=0.0)
        most = _HOPELESS[min(visits, len(_HOPELESS) - 1)] * quickest
        alive = [name for name, one in found.items() if one.seconds <= most]
        anew = [] if visits else _surprising(trials, alive)
        alive, anew = world.share_json([alive + anew, anew])
        going = [trial for trial in trials if trial.candidate in alive]
        until = ends
        if all(len(trial.seconds) >= _MANY for trial in going):
            near = world.share_json([name for name, one in found.items() if one.seconds <= _HOPELESS[0] * quickest])
            rest = [trial for trial in trials if trial.candidate in near and len(trial.seconds) < _MANY]
            going, until = (rest, ends) if rest else (going, soon)
        for trial in going:
            if world.share_json(clock() > until):
                return refused
            if trial.candidate in refused:
                continue
            before = len(trial.seconds) if trial.candidate in anew else 0
            try:
                trial.visit()
            except Exception as error:
                refused[trial.candidate] = _refused(error, trial.candidate, world)
            del trial.seconds[:before]
        if not going:
            break
    return refused


def _surprising(trials: Sequence[_Trial], alive: Sequence[str]) -> list[str]:
    """Return the candidates that were dropped although their forecast is close to that of the remaining ones."""
    said = {trial.candidate: trial.said for trial in trials}
    most = _LIKELY * min((said[name] for name in alive), default=0.0)
    return [name for name, own in said.items() if name not in alive and 0 < own <= most]


def _made(
    ready: PreparedJob, one: TimingTrial, depths: Sequence[int], *, world: World, before: Sequence[_Trial], clock: Clock
) -> Iterator[_Trial]:
    """Yield trials of the whole model, or of two truncated ones, each after its first turn."""
    task = replace(ready.task, layout=one.layout)
    plan = make_plan(task, ready.job, ready.settings, micro_batch_size=one.micro_batch_size)
    for most in kept_blocks(one, depths):
        job = ready.job if most is None else replace(ready.job, model=_shorter(ready.job, most))
        settings = ready.settings
        if most is None and one.stages:
            place = replace(settings.place, stages=tuple(map(int, one.stages.split(","))))
            settings = replace(settings, place=place)
        blocks = sum(depths) if most is None else sum(min(most, depth) for depth in depths)
        built = build_training_setup(job=job, settings=settings, plan=plan, world=world)
        trial = _Trial(
            candidate=one.candidate, blocks=blocks, built=built, batches=_batches(built), said=one.seconds, clock=clock
        )
        trial.begin(min((other.usual for other in before if other.blocks == blocks), default=inf))
        yield trial


def kept_blocks(one: TimingTrial, depths: Sequence[int]) -> list[int | None]:
    """Return the two depths per list of equal blocks from which to extrapolate, or None for the whole model.

    The extrapolation to about three times the longer depth multiplies errors by about four. So models with few blocks,
    and pipelines with many stages, are not truncated.
    """
    fewest, depth = -(-one.least_blocks // max(1, len(depths))), min(depths, default=0)
    few, more = max(fewest, -(-depth // _FEW)), max(2 * fewest, -(-depth // _MORE))
    return [few, more] if depth > _FEW and 2 * more <= depth else [None]


def can_be_cut(ready: PreparedJob) -> bool:
    """Return whether lists of blocks may be truncated: not if settings name blocks, or weights come from files."""
    place = ready.settings.place
    return not (place.blocks or place.stages or place.tensor_plan or isinstance(ready.job.model, PretrainedModel))


def _shorter(job: Job, most: int) -> Any:
    def model() -> nn.Module:
        found = job.model()
        truncate_block_lists(found, most)
        return found

    return model


def _batches(built: TrainingSetup) -> Iterator[StepInput]:
    cut = cut_for(built.plan, built.settings, built.worlds.data)
    while True:
        yield from feed_for(built.data, built.settings, cut=cut, agree=built.world.gather_json)
