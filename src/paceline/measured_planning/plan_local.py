"""Plan for the machines on which these ranks run, with a machine benchmark and timed steps."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.comm.process_group import LaunchInfo, World
from paceline.errors import JobError, PacelineError, one_line_message, user_line
from paceline.launch.failures.oom_detection import freeze_existing_objects, is_out_of_memory
from paceline.measured_planning.profile.prepare_profiling import make_search_space, prepare_for_profiling
from paceline.measured_planning.profile.profile_job import profile_model
from paceline.measured_planning.profile.truncated_model import truncate_depth
from paceline.measured_planning.timing.layout_timing import can_truncate_blocks, time_layouts
from paceline.planner.advice.named_layouts import evaluate_named_layouts
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate, MeasuredTime
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.hardware.cluster import Cluster, cluster_from_json
from paceline.planner.hardware.local_cluster import measured_cluster
from paceline.planner.model_costs.model_profile import ModelProfile
from paceline.planner.search.search_space import SearchSpace
from paceline.planner.search.shortlist import (
    RejectedLayout,
    TimingTrial,
    apply_measured_times,
    shortlist,
    timing_order,
    timing_trial,
)
from paceline.profiling.cpu_contention import max_cpu_contention, read_cpu_times
from paceline.profiling.machine_benchmarks.benchmark_cache import machine_fingerprint
from paceline.profiling.machine_benchmarks.benchmark_worker import probe_world
from paceline.run_folder.run_folder import ROOT
from paceline.trainer.setup.prepare import PreparedJob, join_world


@dataclass(frozen=True, kw_only=True)
class LocalMachineRequest:
    """The input of `plan_local_layouts` besides the job.

    `seconds` is the time limit for timing layouts. With 0, no layout is timed. `fleet` is a `Cluster` as JSON. If it is
    None, the machines are benchmarked for `probe_seconds`. `node_bytes` is the memory of a node or, with GPUs, of each
    GPU.
    """

    seconds: float
    fleet: Mapping[str, Any] | None = None
    probe_seconds: float = 0.0
    ranks_per_node: int = 1
    node_bytes: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ProfiledJob:
    """A job as the user wrote it (`original`) and prepared for replays (`ready`), with the profile of its model.

    `depths` are the lengths of the model's lists of equal blocks, empty if they can't be truncated. `notes` are lines
    to print.
    """

    original: PreparedJob
    ready: PreparedJob
    profile: ModelProfile
    depths: Sequence[int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlannedLayouts:
    """The cost model of a job (`forecast`), and the layouts to choose from (`options`), which fit by forecast.

    `grid` is the space to search again if all options turn out not to fit. `rejected` are the layouts that were refused
    during timing, with reasons. `other_cpu_share` is the fraction of the cores that other programs used during timing.
    """

    profiled_job: ProfiledJob
    forecast: CostModel
    grid: SearchSpace
    options: Sequence[Estimate]
    rejected: Mapping[Candidate, RejectedLayout] = field(default_factory=dict)
    other_cpu_share: float = 0.0


@freeze_existing_objects()
def profile_for_plan(prepared_job: PreparedJob, *, max_ranks: int) -> ProfiledJob:
    """Return the job with its profile. Profiling needs no device, and no memory for the model.

    Raises:
        PacelineError: the job can't be traced.
    """
    original = prepared_job
    try:
        prepared_job, notes = prepare_for_profiling(prepared_job)
        depths = truncate_depth(prepared_job.job)[1]
        profile = profile_model(prepared_job.job, prepared_job.settings, max_ranks=max_ranks)
    except PacelineError:
        raise
    except Exception as error:  # an error in the job's own code
        if is_out_of_memory(error):
            raise
        raise _profiling_error(error) from error
    return ProfiledJob(
        original=original,
        ready=prepared_job,
        profile=profile,
        depths=depths if can_truncate_blocks(prepared_job) else [],
        notes=notes,
    )


def _profiling_error(error: Exception) -> JobError:
    return JobError(
        f"the job can't be profiled without real values: {one_line_message(error)}",
        where=str(user_line(error) or ""),
        cause="a plan runs the job on fake tensors, where every comparison is true and every number is 1; "
        "or the job fails with real values too",
        hint="name a layout, so that no plan is needed: paceline train JOB --layout ddp",
    )


def plan_local_layouts(
    prepared_job: PreparedJob, request: LocalMachineRequest, *, layouts: Sequence[str] = ()
) -> PlannedLayouts | None:
    """Time the named layouts, or the best ones if none is named. Return them with the profile on rank 0, else None.

    Every rank calls this. Before the process group is created, rank 0 profiles the job on tensors without memory.
    """
    launch_info, grid = LaunchInfo.read(os.environ), make_search_space(prepared_job.settings, command="paceline plan")
    profiled_job = profile_for_plan(prepared_job, max_ranks=launch_info.world_size) if launch_info.rank == 0 else None
    world = join_world(prepared_job)  # not closed after an error: other ranks would report closed connections first
    cluster = _measure_cluster(prepared_job, request, world)
    planned = None
    if profiled_job is None:
        if request.seconds:
            _time_options(prepared_job, [], (), world=world, seconds=request.seconds)
    else:
        forecast = CostModel(profile=profiled_job.profile, cluster=cluster)
        options = _named_estimates(prepared_job, forecast, layouts) if layouts else shortlist(forecast, grid=grid)
        rejected: dict[Candidate, RejectedLayout] = {}
        other_cpu_share = 0.0
        if request.seconds:
            options, rejected, other_cpu_share = _time_options(
                prepared_job, options, profiled_job.depths, world=world, seconds=request.seconds
            )
        planned = PlannedLayouts(
            profiled_job=profiled_job,
            forecast=forecast,
            grid=grid,
            options=options,
            rejected=rejected,
            other_cpu_share=other_cpu_share,
        )
    world.close()
    return planned


def _named_estimates(prepared_job: PreparedJob, forecast: CostModel, layouts: Sequence[str]) -> list[Estimate]:
    """Return the estimates of the named layouts that use all ranks and fit."""
    named_layouts = evaluate_named_layouts(
        forecast, layouts, micro_batch_size=prepared_job.settings.train.micro_batch_size
    )
    estimates = [row.estimate for row in named_layouts.rows]
    return [estimate for estimate in estimates if estimate.fits and estimate.candidate.ranks == forecast.cluster.ranks]


def _measure_cluster(prepared_job: PreparedJob, request: LocalMachineRequest, world: World) -> Cluster:
    if request.fleet is not None:
        return cluster_from_json(request.fleet)
    ranks, ranks_per_node = world.world_size, request.ranks_per_node
    machine = machine_fingerprint(ranks=ranks, device=prepared_job.plan.device, ranks_per_node=ranks_per_node)
    probe = probe_world(
        world, machine, seconds=request.probe_seconds, folder=Path(ROOT).absolute(), ranks_per_node=ranks_per_node
    )
    nodes = ranks / ranks_per_node if prepared_job.plan.device == "cpu" else 1
    return measured_cluster(probe, ranks=ranks, memory_bytes=nodes * request.node_bytes)


def _time_options(
    prepared_job: PreparedJob, options: Sequence[Estimate], depths: Sequence[int], *, world: World, seconds: float
) -> tuple[list[Estimate], dict[Candidate, RejectedLayout], float]:
    """Time the options of rank 0. Every rank calls this, but only rank 0 passes options.

    Return the accepted options with their measured times, the rejected ones, and the CPU share of other programs.
    """
    trials, depths = world.share_json(
        [[timing_trial(estimate).as_json() for estimate in timing_order(options)], list(depths)]
    )
    cpu_before = read_cpu_times()
    timings = time_layouts(
        prepared_job, [TimingTrial(**trial) for trial in trials], depths=depths, world=world, seconds=seconds
    )
    other_cpu_share = max_cpu_contention([cpu_before, read_cpu_times()], world)
    rejected = {
        estimate.candidate: timing
        for estimate in options
        if isinstance(timing := timings.get(str(estimate.candidate)), RejectedLayout)
    }
    accepted = [estimate for estimate in options if estimate.candidate not in rejected]
    return (
        apply_measured_times(
            accepted, {name: timing for name, timing in timings.items() if isinstance(timing, MeasuredTime)}
        ),
        rejected,
        other_cpu_share,
    )
