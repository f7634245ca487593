"""Time layouts on the ranks of the run. A layout runs real steps, on a model that may have fewer blocks."""

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

from paceline.comm.process_group import LaunchInfo, World
from paceline.comm.timed_barrier import all_ranks_arrive
from paceline.data.types import StepInput
from paceline.errors import DataError, JobError, PacelineError, one_line_message
from paceline.job import Job
from paceline.launch.failures.oom_detection import is_out_of_memory
from paceline.measured_planning.profile.truncated_model import truncate_block_lists
from paceline.measured_planning.timing.timing_summary import summarize_timings
from paceline.parallel.initialization.pretrained import PretrainedModel
from paceline.planner.cost.estimate import MeasuredTime
from paceline.planner.search.shortlist import RejectedLayout, TimingTrial
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.trainer.setup.job_data import build_loader, build_partition
from paceline.trainer.setup.prepare import PreparedJob, make_plan

Clock = Callable[[], float]
_MEMORY_SHARE = 0.5  # of a rank's memory, for the layouts that are timed together
_BUILD_SHARE = 0.5  # of the time limit, for building the layouts
_MAX_OVERRUN = 2  # after this multiple of the time limit, no group of layouts is started
_TURN_SECONDS, _MAX_STEPS_PER_TURN = 0.15, 5
_LONG_STEP_SECONDS = 0.2  # a longer step does not depend on warm caches
_CONSECUTIVE_STEPS = 4  # in a turn on several machines, because pipeline stages overlap two steps
_SHORTER_DIVISOR, _LONGER_DIVISOR = 12, 3  # a deep model is timed with 1/12 and with 1/3 of its blocks
# Limits for the first and for the second step of a layout, as multiples of the fastest layout's step time. A layout
# above a limit is not timed further, unless its forecast is among the best.
_TOO_SLOW_RATIOS = (4.0, 2.5)
# Timing ends after 2/3 of the time limit if each layout has run 24 steps by then.
_EARLY_END_SHARE, _ENOUGH_STEPS = 2 / 3, 24
_DROP_RATIOS = (1.8, 1.5, 1.4, 1.3, 1.2)  # by round: a layout slower than this multiple of the fastest is dropped
# A dropped layout gets a second turn if its forecast is below this multiple of the best forecast.
_SECOND_TURN_RATIO = 1.2


@dataclass(kw_only=True)
class _Trial:
    """A layout with a model of `blocks` blocks, ready to run steps.

    `seconds` are the times of this rank's counted steps, which began at `start_time`. `step_seconds` is the time of the
    latest warm-up step on this rank or, on several machines, the mean of the latest counted steps.
    """

    candidate: str
    blocks: int
    setup: TrainingSetup
    batches: Iterator[StepInput]
    forecast_seconds: float = 0.0
    step_seconds: float = 0.0
    start_time: float = 0.0
    seconds: list[float] = field(default_factory=list)
    clock: Clock

    def run_step(self) -> float:
        """Read a batch, run a step on it, and return the seconds of reading and step together."""
        start_time = self.clock()
        self.setup.step.run(next(self.batches))
        if self.setup.world.device.type == "cuda":
            torch.cuda.synchronize(self.setup.world.device)
        return self.clock() - start_time

    def warm_up(self, fastest: float) -> None:
        """Run two warm-up steps and the first turn. After a step far slower than `fastest`, count only this step."""
        for ratio in _TOO_SLOW_RATIOS:
            self.start_time = self.clock()
            self.step_seconds = self.run_step()
            if self.setup.world.share_json(self.step_seconds > ratio * fastest):
                self.seconds = [self.step_seconds]
                return
        self.start_time = self.clock()
        self.take_turn()

    def take_turn(self) -> None:
        """Run some counted steps, the same number on every rank. Before short steps, an uncounted step warms caches.

        On several machines, count the mean of consecutive steps as one step.
        """
        launch_info, share_json = LaunchInfo.read(os.environ), self.setup.world.share_json
        if launch_info.local_world_size < launch_info.world_size:
            self.run_step()
            self.step_seconds = fmean(self.run_step() for _ in range(_CONSECUTIVE_STEPS))
            self.seconds.append(self.step_seconds)
            return
        if share_json(self.step_seconds < _LONG_STEP_SECONDS):
            self.step_seconds = self.run_step()
        num_steps = min(_MAX_STEPS_PER_TURN, max(1, round(_TURN_SECONDS / self.step_seconds)))
        self.seconds += [self.run_step() for _ in range(int(share_json(num_steps)))]

    def close(self) -> None:
        """Free the model."""
        self.setup.close()
        del self.setup, self.batches


def time_layouts(
    prepared_job: PreparedJob, timing_trials: Sequence[TimingTrial], *, depths: Sequence[int], world: World,
    seconds: float, clock: Clock = time.perf_counter,
) -> dict[str, MeasuredTime | RejectedLayout]:  # fmt: skip
    """Return each candidate's step time, or the reason for its refusal. Every rank calls this.

    `depths` are the lengths of the model's lists of equal blocks, empty if they can't be truncated. `seconds` is the
    time limit, measured by `clock`. As many layouts as fit in memory together take turns, so that a disturbance of the
    machine affects all of them. Layouts are built in the order of `timing_trials`. Those that are not ready in time are
    omitted. Timing ends early if steps are short.

    Raises:
        JobError: the job's own code fails with every layout.
    """
    results: dict[str, MeasuredTime | RejectedLayout] = {}
    start_time, groups = clock(), list(_memory_groups(timing_trials))
    for group in groups:
        if results and world.share_json(clock() - start_time > _MAX_OVERRUN * seconds):
            break
        results |= _time_group(prepared_job, group, depths, world=world, seconds=seconds / len(groups), clock=clock)
    job_errors = [result for result in results.values() if isinstance(result, RejectedLayout) and result.is_job_error]
    if job_errors and len(job_errors) == len(results):
        raise JobError(
            f"none of {len(job_errors)} layouts can be timed with any of the microbatch sizes tried: "
            f"{job_errors[0].reason}",
            cause="the job's own code raises this error on every rank, only with real values",
            hint="fix the job; if only one microbatch size fails, set another --train.micro_batch_size",
        )
    return results


def _memory_groups(timing_trials: Sequence[TimingTrial]) -> Iterator[list[TimingTrial]]:
    """Yield groups of trials that fit in memory together.

    A group fits if the memory holds the states of all its trials and, in addition, what a step of one of them needs.
    """
    group: list[TimingTrial] = []
    for trial in timing_trials:
        extended = [*group, trial]
        step_fraction = max(member.peak_fraction - member.state_fraction for member in extended)
        if group and sum(member.state_fraction for member in extended) + step_fraction > _MEMORY_SHARE:
            yield group
            extended = [trial]
        group = extended
    if group:
        yield group


def _time_group(
    prepared_job: PreparedJob,
    timing_trials: Sequence[TimingTrial],
    depths: Sequence[int],
    *,
    world: World,
    seconds: float,
    clock: Clock,
) -> dict[str, MeasuredTime | RejectedLayout]:
    start_time, trials = clock(), list[_Trial]()
    clock_zero = time.time() - start_time  # the time of day at which the clock was 0
    errors: dict[str, MeasuredTime | RejectedLayout] = {}
    for timing_trial in timing_trials:
        if trials and world.share_json(clock() - start_time > _BUILD_SHARE * seconds):
            break
        try:
            new_trials = _build_trials(
                prepared_job, timing_trial, depths, world=world, earlier_trials=trials, clock=clock
            )
            trials += list(new_trials)  # if one of two depths fails, neither is added
        except DataError:  # may be on one rank only, and does not depend on the layout
            raise
        except PacelineError as error:  # every rank raises the same error
            errors[timing_trial.candidate] = RejectedLayout(reason=error.what)
        except Exception as error:
            errors[timing_trial.candidate] = _rejection(error, timing_trial.candidate, world)
    early_end, end_time = start_time + _EARLY_END_SHARE * seconds, start_time + seconds
    errors |= _take_turns(trials, depths, world=world, early_end=early_end, end_time=end_time, clock=clock)
    accepted = [trial for trial in trials if trial.candidate not in errors]
    seconds_by_rank = world.gather_json([trial.seconds for trial in accepted])
    # of each trial: the seconds of each step on the slowest rank
    steps = [[max(step) for step in zip(*of_ranks, strict=True)] for of_ranks in zip(*seconds_by_rank, strict=True)]
    timings = [
        (trial.candidate, trial.blocks, step_seconds) for trial, step_seconds in zip(accepted, steps, strict=True)
    ]
    since, until = {trial.candidate: clock_zero + trial.start_time for trial in reversed(trials)}, clock_zero + clock()
    # Reached only if no exception was raised. Closing after an exception would hide it: the other ranks would report
    # the closed connections first.
    for trial in trials:
        trial.close()
    gc.collect()
    summaries = summarize_timings(timings, depths)
    return {name: replace(summary, between=(since[name], until)) for name, summary in summaries.items()} | errors


def _rejection(error: Exception, candidate: str, world: World) -> RejectedLayout:
    """Return the rejection of a layout for an error that every rank has raised.

    Raise the error again, which ends the timing, if data can't be read, if memory ran out, or if not every rank has
    raised an error.
    """
    if isinstance(error, DataError) or is_out_of_memory(error) or not all_ranks_arrive(world, candidate):
        raise error
    return RejectedLayout(reason=one_line_message(error), is_job_error=True)


def _take_turns(
    trials: Sequence[_Trial], depths: Sequence[int], *, world: World, early_end: float, end_time: float, clock: Clock
) -> dict[str, MeasuredTime | RejectedLayout]:
    """Time the trials in rounds, until the time is over or there are enough steps. Return the trials that fail.

    In a round, each active trial has a turn. A trial that is much slower than the fastest is not active, until the
    active trials have enough steps. A trial that is slow in the first round, but whose forecast is close to the best,
    gets a second turn that replaces the first, because the machine may have been busy.
    """
    rejected: dict[str, MeasuredTime | RejectedLayout] = {}
    for turn in count():
        trials = [trial for trial in trials if trial.candidate not in rejected]
        summaries = summarize_timings([(trial.candidate, trial.blocks, trial.seconds) for trial in trials], depths)
        fastest = min((summary.seconds for summary in summaries.values()), default=0.0)
        max_seconds = _DROP_RATIOS[min(turn, len(_DROP_RATIOS) - 1)] * fastest
        candidates = [name for name, summary in summaries.items() if summary.seconds <= max_seconds]
        second_turns = [] if turn else _second_turn_candidates(trials, candidates)
        candidates, second_turns = world.share_json([candidates + second_turns, second_turns])
        active = [trial for trial in trials if trial.candidate in candidates]
        deadline = end_time
        if all(len(trial.seconds) >= _ENOUGH_STEPS for trial in active):
            nearly_fastest = world.share_json(
                [name for name, summary in summaries.items() if summary.seconds <= _DROP_RATIOS[0] * fastest]
            )
            unfinished = [
                trial for trial in trials if trial.candidate in nearly_fastest and len(trial.seconds) < _ENOUGH_STEPS
            ]
            active, deadline = (unfinished, end_time) if unfinished else (active, early_end)
        for trial in active:
            if world.share_json(clock() > deadline):
                return rejected
            if trial.candidate in rejected:
                continue
            num_discarded = len(trial.seconds) if trial.candidate in second_turns else 0
            try:
                trial.take_turn()
            except Exception as error:
                rejected[trial.candidate] = _rejection(error, trial.candidate, world)
            del trial.seconds[:num_discarded]
        if not active:
            break
    return rejected


def _second_turn_candidates(trials: Sequence[_Trial], candidates: Sequence[str]) -> list[str]:
    """Return the candidates outside `candidates` whose forecast is close to the best forecast in `candidates`."""
    forecasts = {trial.candidate: trial.forecast_seconds for trial in trials}
    max_seconds = _SECOND_TURN_RATIO * min((forecasts[name] for name in candidates), default=0.0)
    return [name for name, seconds in forecasts.items() if name not in candidates and 0 < seconds <= max_seconds]


def _build_trials(
    prepared_job: PreparedJob,
    timing_trial: TimingTrial,
    depths: Sequence[int],
    *,
    world: World,
    earlier_trials: Sequence[_Trial],
    clock: Clock,
) -> Iterator[_Trial]:
    """Yield a trial of the whole model, or trials of two truncated models. Each has had its first turn."""
    task = replace(prepared_job.task, layout=timing_trial.layout)
    plan = make_plan(task, prepared_job.job, prepared_job.settings, micro_batch_size=timing_trial.micro_batch_size)
    for max_blocks in extrapolation_depths(timing_trial, depths):
        job = (
            prepared_job.job
            if max_blocks is None
            else replace(prepared_job.job, model=_truncated_model_factory(prepared_job.job, max_blocks))
        )
        settings = prepared_job.settings
        if max_blocks is None and timing_trial.stages:
            place = replace(settings.place, stages=tuple(map(int, timing_trial.stages.split(","))))
            settings = replace(settings, place=place)
        blocks = sum(depths) if max_blocks is None else sum(min(max_blocks, depth) for depth in depths)
        setup = build_training_setup(job=job, settings=settings, plan=plan, world=world)
        trial = _Trial(
            candidate=timing_trial.candidate,
            blocks=blocks,
            setup=setup,
            batches=_batches(setup),
            forecast_seconds=timing_trial.seconds,
            clock=clock,
        )
        trial.warm_up(min((other.step_seconds for other in earlier_trials if other.blocks == blocks), default=inf))
        yield trial


def extrapolation_depths(timing_trial: TimingTrial, depths: Sequence[int]) -> list[int | None]:
    """Return the lengths to which the lists of equal blocks are truncated for timing: two lengths to extrapolate from.

    Return `[None]` if the whole model is timed. This is more accurate, because an extrapolation to about three times
    the longer length multiplies errors by about four. Models with few blocks are timed whole, because it takes little
    longer. Pipelines with many stages are timed whole too, because each stage needs a block.
    """
    min_blocks, depth = -(-timing_trial.min_blocks // max(1, len(depths))), min(depths, default=0)
    few, more = max(min_blocks, -(-depth // _SHORTER_DIVISOR)), max(2 * min_blocks, -(-depth // _LONGER_DIVISOR))
    return [few, more] if depth > _SHORTER_DIVISOR and 2 * more <= depth else [None]


def can_truncate_blocks(prepared_job: PreparedJob) -> bool:
    """Return whether lists of blocks may be truncated: settings name no blocks, and weights do not come from files."""
    place = prepared_job.settings.place
    return not (
        place.blocks or place.stages or place.tensor_plan or isinstance(prepared_job.job.model, PretrainedModel)
    )


def _truncated_model_factory(job: Job, max_blocks: int) -> Any:
    def model() -> nn.Module:
        truncated = job.model()
        truncate_block_lists(truncated, max_blocks)
        return truncated

    return model


def _batches(setup: TrainingSetup) -> Iterator[StepInput]:
    """Yield the batches of the training data, epoch after epoch."""
    partition = build_partition(setup.plan, setup.settings, setup.worlds.data)
    while True:
        yield from build_loader(setup.data, setup.settings, partition=partition, gather_json=setup.world.gather_json)
