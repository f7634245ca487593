"""Memory replay: a run's own step, placed as in the run, on fake tensors and simulated ranks."""

import gc
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from paceline.comm.rank_threads import run_threads
from paceline.config.settings import Settings
from paceline.data.types import StepInput
from paceline.job import Job
from paceline.launch.failures.oom_detection import trim_heap
from paceline.measured_planning.simulated_ranks import SimulatedRanks
from paceline.planner.cost.pipeline_formulas import max_in_flight
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.pipeline_options import is_schedule_file
from paceline.profiling.cpu_workspace.operator_workspace import gloo_copies, moment_bytes
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.profiling.model_tracing.memory_timeline import MemoryTimeline
from paceline.profiling.model_tracing.memory_tracker import (
    MemoryByKind,
    MemoryTracker,
    StorageTracker,
    elements,
    memory_at_rest,
)
from paceline.schedule.registry import find_schedule
from paceline.step.pipeline.pipeline_forward_backward import PipelineForwardBackward
from paceline.step.update_rules import step_rule
from paceline.torch_internals.dispatch_modes import fake_process_group
from paceline.torch_internals.pytree import tensor_leaves
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.loop import num_retained_batches
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.trainer.setup.job_data import cut_for, read_first

_MOST_MICRO = 2  # microbatches without a pipeline: all after the first are equal


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The memory of one stage: between steps, and at its peak."""

    between: MemoryByKind
    peak: MemoryByKind


def replay(
    job: Job, settings: Settings, plan: ExecutionPlan, *, journals: Sequence[MemoryTimeline] = (), warm: bool = True
) -> list[StageMemory]:
    """Run two steps of every stage and return the memory of the second; `timelines` has one for each stage, or none.

    Without `warm_up`, for one stage, the first step is recorded, which creates gradients and optimizer state.

    Raises:
        PacelineError: the run itself would be refused.
    """
    scene = SimulatedRanks(mesh=plan.mesh)
    alone = plan.mesh.ranks == 1
    with nullcontext() if alone else fake_process_group(plan.mesh.ranks), preserve_rng():
        if plan.mesh.pp == 1:
            with scene.baton:
                return [_stage(job, settings, plan, scene, 0, *journals, warm=warm)]
        return _together(job, settings, plan, scene, journals)


def _together(
    job: Job, settings: Settings, plan: ExecutionPlan, scene: SimulatedRanks, journals: Sequence[MemoryTimeline]
) -> list[StageMemory]:
    def run(stage: int) -> StageMemory:
        with scene.baton:
            return _stage(job, settings, plan, scene, stage, *journals[stage : stage + 1])

    return run_threads(run, ranks=plan.mesh.pp, leave=scene.leave)


def _stage(
    job: Job,
    settings: Settings,
    whole: ExecutionPlan,
    scene: SimulatedRanks,
    stage: int,
    journal: MemoryTimeline | None = None,
    *,
    warm: bool = True,
) -> StageMemory:
    plan = shorten_plan(whole)
    world = scene.world(stage, backend=plan.backend)
    made = StorageTracker()
    hollow = FakeExecutionMode(
        emptied=scene.emptied, see=made.see, copies=gloo_copies if plan.backend == "gloo" else None
    )
    with hollow:
        hollow.holds = False
        built = build_training_setup(job=job, settings=settings, plan=plan, world=world)
        hollow.holds = True
        shares = [member.parameter for member in built.named]
        optimizers = built.update.optimizers
        given = _batches(
            built, plan, num_retained_batches(built) if step_rule(plan.update_rule).traits.reads_samples else 2
        )
        first = _first(plan)
        if warm:
            built.step.run(given[-2] if first is None else _batches(built, first, 1)[0])
        left_out = _left_out_bytes(given, whole, plan)
        gc.collect()  # garbage in cycles is not part of the step
        watch = MemoryTracker(
            model=built.model,
            optimizers=optimizers,
            shares=shares,
            others=made.storages(),
            moment=partial(moment_bytes, threads=plan.threads),
            beside=lambda: hollow.copied_bytes + left_out,
            note=None if journal is None else journal.note,
            turn=None if journal is None else journal.turn,
        )
        with watch, _in_parts(built, journal):
            built.step.run(given[-1])
        between = memory_at_rest(model=built.model, optimizers=optimizers, shares=shares)
        built.close()
    trim_heap()
    return StageMemory(between=between, peak=watch.peak)


def _batches(built: TrainingSetup, plan: ExecutionPlan, count: int) -> list[StepInput]:
    cut = cut_for(plan, built.settings, built.worlds.data)
    return read_first(built.data, built.settings, cut=cut, count=count)


def _in_parts(built: TrainingSetup, journal: MemoryTimeline | None) -> AbstractContextManager[None]:
    """Return a context that starts a new part of the timeline after each action of a pipeline stage."""
    passes = built.step.passes
    if journal is None or not isinstance(passes, PipelineForwardBackward):
        return nullcontext()
    return passes.watched(lambda *_: journal.turn())


def _first(plan: ExecutionPlan) -> ExecutionPlan | None:
    """Return a plan of one round, for a step that creates gradients and optimizer state.

    Return None if the step must be as long as the others: gloo keeps the tensors that it sent, and asynchronous update
    rules end in the middle of a step.
    """
    return None if plan.backend == "gloo" or not plan.update_rule.is_synchronous else _of_rounds(plan, 1)


def _left_out_bytes(given: Sequence[StepInput], whole: ExecutionPlan, short: ExecutionPlan) -> int:
    """Return the data bytes of left-out microbatches: on a CPU of all batches in memory, on a device of one."""
    there, every = (-(-one.num_micro // one.replicas) for one in (short, whole))
    each = elements([t for t in tensor_leaves([one.data for one in given[-1].micro[-1:]]) if t.layout is torch.strided])
    batches = len(given)
    return each * max(0, batches * (every - there) if whole.device == "cpu" else every - batches * there)


def shorten_plan(plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with as few microbatches as leave the peak memory unchanged."""
    rounds = -(-plan.num_micro // plan.replicas)
    return _of_rounds(plan, min(_MOST_MICRO, rounds) if plan.mesh.pp == 1 else _filled(plan, rounds))


def _of_rounds(plan: ExecutionPlan, rounds: int) -> ExecutionPlan:
    num_micro = rounds * plan.replicas
    return replace(plan, num_micro=num_micro, global_batch_size=num_micro * plan.micro_batch_size)


def _filled(plan: ExecutionPlan, rounds: int) -> int:
    """Return how many microbatches fill the pipeline: more of them do not change any rank's peak."""
    if is_schedule_file(plan.asked.schedule) or plan.backend == "gloo":  # gloo keeps sent tensors until the step ends
        return rounds
    rule, ranks = find_schedule(plan.asked.schedule), plan.mesh.pp
    virtual = plan.asked.virtual or rule.virtual

    def held(micro: int) -> list[int]:
        places = range(ranks)
        return [max_in_flight(rule.name, ranks=ranks, micro=micro, virtual=virtual, rank=place) for place in places]

    fewest, by = (ranks + 2, 1) if rule.name == "1f1b" else (2 * ranks, ranks)
    return next((micro for micro in range(fewest, rounds, by) if held(micro) == held(rounds)), rounds)
