"""Memory replay: run a step of a layout on fake tensors and simulated ranks, and measure the memory of each stage.

In this module, a stage is all that one rank of the pipeline holds, even if the schedule gives this rank several
pipeline stages. If several ranks hold the same stage, only the first of them is replayed.
"""

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
from paceline.profiling.cpu_workspace.operator_workspace import gloo_copies, peak_operator_bytes
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.profiling.model_tracing.memory_timeline import MemoryTimeline
from paceline.profiling.model_tracing.memory_tracker import (
    MemoryByKind,
    MemoryTracker,
    StorageTracker,
    element_bytes,
    memory_at_rest,
)
from paceline.schedule.registry import find_schedule
from paceline.step.pipeline.pipeline_forward_backward import PipelineForwardBackward
from paceline.step.update_rules import step_rule
from paceline.torch_internals.dispatch_modes import fake_process_group
from paceline.torch_internals.pytree import tensor_leaves
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.setup.build_training_setup import TrainingSetup, build_training_setup
from paceline.trainer.setup.job_data import build_partition, read_first

_MAX_MICROBATCHES = 2  # per replica without a pipeline: all microbatches after the first need equal memory


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """The memory of one stage: between steps, and at the peak of a step."""

    between_steps: MemoryByKind
    peak: MemoryByKind


def replay(
    job: Job, settings: Settings, plan: ExecutionPlan, *, timelines: Sequence[MemoryTimeline] = (), warm_up: bool = True
) -> list[StageMemory]:
    """Run two steps of every stage, and return the memory of the second step.

    `timelines` is empty, or has one timeline for each stage, which records the second step. With one stage,
    `warm_up=False` omits the first step. The only step then creates gradients and optimizer state.

    Raises:
        PacelineError: the run itself would be refused.
    """
    simulated_ranks = SimulatedRanks(mesh=plan.mesh)
    is_single = plan.mesh.ranks == 1
    with nullcontext() if is_single else fake_process_group(plan.mesh.ranks), preserve_rng():
        if plan.mesh.pp == 1:
            with simulated_ranks.run_lock:
                return [_replay_stage(job, settings, plan, simulated_ranks, 0, *timelines, warm_up=warm_up)]
        return _replay_stages(job, settings, plan, simulated_ranks, timelines)


def _replay_stages(
    job: Job,
    settings: Settings,
    plan: ExecutionPlan,
    simulated_ranks: SimulatedRanks,
    timelines: Sequence[MemoryTimeline],
) -> list[StageMemory]:
    def replay_stage(stage: int) -> StageMemory:
        with simulated_ranks.run_lock:
            return _replay_stage(job, settings, plan, simulated_ranks, stage, *timelines[stage : stage + 1])

    return run_threads(replay_stage, ranks=plan.mesh.pp, end_waiting=simulated_ranks.abort)


def _replay_stage(
    job: Job,
    settings: Settings,
    full_plan: ExecutionPlan,
    simulated_ranks: SimulatedRanks,
    stage: int,
    timeline: MemoryTimeline | None = None,
    *,
    warm_up: bool = True,
) -> StageMemory:
    plan = shorten_plan(full_plan)
    world = simulated_ranks.world(stage, backend=plan.backend)
    storage_tracker = StorageTracker()
    fake_mode = FakeExecutionMode(
        fake_storages=simulated_ranks.fake_storages,
        on_operation=storage_tracker.observe,
        backend_copies=gloo_copies if plan.backend == "gloo" else None,
    )
    with fake_mode:
        # While the model is built, comparisons of unknown numbers give False. Otherwise a constructor that samples
        # until a value is within bounds would never end.
        fake_mode.comparisons_are_true = False
        setup = build_training_setup(job=job, settings=settings, plan=plan, world=world)
        fake_mode.comparisons_are_true = True
        updated_tensors = [member.parameter for member in setup.named_parameters]
        optimizers = setup.update.optimizers
        # A run keeps `num_retained_batches` batches in memory, so the replay reads the same number. A parameter server
        # keeps batches without samples (`reads_samples` is False), so its replay reads only one batch for each step.
        step_inputs = _read_batches(
            setup, plan, setup.step.num_retained_batches if step_rule(plan.update_rule).traits.reads_samples else 2
        )
        warm_up_plan = _warm_up_plan(plan)
        if warm_up:
            setup.step.run(step_inputs[-2] if warm_up_plan is None else _read_batches(setup, warm_up_plan, 1)[0])
        omitted_bytes = _omitted_bytes(step_inputs, full_plan, plan)
        gc.collect()  # garbage of the first step must not count
        tracker = MemoryTracker(
            model=setup.model,
            optimizers=optimizers,
            updated_tensors=updated_tensors,
            other_storages=storage_tracker.finish(),
            operator_bytes=partial(peak_operator_bytes, threads=plan.threads),
            extra_bytes=lambda: fake_mode.copied_bytes + omitted_bytes,
            on_operation=None if timeline is None else timeline.record,
            on_phase_change=None if timeline is None else timeline.start_part,
        )
        with tracker, _record_parts(setup, timeline):
            setup.step.run(step_inputs[-1])
        between_steps = memory_at_rest(model=setup.model, optimizers=optimizers, updated_tensors=updated_tensors)
        setup.close()
    trim_heap()
    return StageMemory(between_steps=between_steps, peak=tracker.peak)


def _read_batches(setup: TrainingSetup, plan: ExecutionPlan, count: int) -> list[StepInput]:
    partition = build_partition(plan, setup.settings, setup.worlds.data)
    return read_first(setup.data, setup.settings, partition=partition, count=count)


def _record_parts(setup: TrainingSetup, timeline: MemoryTimeline | None) -> AbstractContextManager[None]:
    """Return a context in which the timeline starts a new part after each action of a pipeline schedule."""
    forward_backward = setup.step.forward_backward
    if timeline is None or not isinstance(forward_backward, PipelineForwardBackward):
        return nullcontext()
    return forward_backward.observe_actions(lambda *_: timeline.start_part())


def _warm_up_plan(plan: ExecutionPlan) -> ExecutionPlan | None:
    """Return a plan of one microbatch per replica, for the first step, which creates gradients and optimizer state.

    Return None if the first step needs all microbatches: with gloo, which references the tensors that it has sent, and
    with asynchronous update rules, whose updates are not at the end of a step.
    """
    return None if plan.backend == "gloo" or not plan.update_rule.is_synchronous else _set_rounds(plan, 1)


def _omitted_bytes(step_inputs: Sequence[StepInput], full_plan: ExecutionPlan, short_plan: ExecutionPlan) -> int:
    """Return the bytes of the data of the microbatches that the replay omits.

    On a CPU all batches in memory count. On a GPU only one batch is on the device.
    """
    short_rounds, full_rounds = (-(-plan.num_micro // plan.replicas) for plan in (short_plan, full_plan))
    microbatch_bytes = element_bytes(
        [t for t in tensor_leaves([micro.data for micro in step_inputs[-1].micro[-1:]]) if t.layout is torch.strided]
    )
    batches = len(step_inputs)  # in memory at the same time
    return microbatch_bytes * max(
        0, batches * (full_rounds - short_rounds) if full_plan.device == "cpu" else full_rounds - batches * short_rounds
    )


def shorten_plan(plan: ExecutionPlan) -> ExecutionPlan:
    """Return the plan with as few microbatches as possible without a change of the peak memory."""
    rounds = -(-plan.num_micro // plan.replicas)
    return _set_rounds(
        plan, min(_MAX_MICROBATCHES, rounds) if plan.mesh.pp == 1 else _rounds_to_fill_pipeline(plan, rounds)
    )


def _set_rounds(plan: ExecutionPlan, rounds: int) -> ExecutionPlan:
    """Return the plan with this number of rounds, which are microbatches per replica."""
    num_micro = rounds * plan.replicas
    return replace(plan, num_micro=num_micro, global_batch_size=num_micro * plan.micro_batch_size)


def _rounds_to_fill_pipeline(plan: ExecutionPlan, rounds: int) -> int:
    """Return how many microbatches fill the pipeline, so that more do not change the peak of any rank."""
    if is_schedule_file(plan.asked.schedule) or plan.backend == "gloo":  # gloo frees sent tensors after the step
        return rounds
    rule, ranks = find_schedule(plan.asked.schedule), plan.mesh.pp
    virtual = plan.asked.virtual or rule.virtual

    def in_flight(micro: int) -> list[int]:
        return [max_in_flight(rule.name, ranks=ranks, micro=micro, virtual=virtual, rank=rank) for rank in range(ranks)]

    first, step = (ranks + 2, 1) if rule.name == "1f1b" else (2 * ranks, ranks)
    return next((micro for micro in range(first, rounds, step) if in_flight(micro) == in_flight(rounds)), rounds)
