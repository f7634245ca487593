"""The `simulate` verb: simulates a step of a layout in virtual time, and forecasts the goodput under failures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from paceline.commands.command_table import VerbOutput
from paceline.commands.common.comparisons.compare_layouts import page_line
from paceline.commands.common.execution import (
    CommandOutcome,
    RunOptions,
    execute,
    make_task,
    read_result,
)
from paceline.commands.common.hf_config_as_job import config_as_job, is_hf_config
from paceline.commands.common.start_folder import assign_run_folder
from paceline.commands.plan import refuse_other_rank_count
from paceline.config.layout import parse_layout
from paceline.console.formatting import format_precise_duration
from paceline.errors import ExitCode, UsageError
from paceline.filesystem.atomic_files import check_writable, report_write_errors
from paceline.planner.advice.recommendations import advise
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.hardware.cluster import Cluster
from paceline.planner.hardware.local_cluster import available_memory, measured_cluster
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.hardware.unit_parsing import QuantityKind, parse_quantity
from paceline.planner.model_costs.model_profile import model_profile_from_json
from paceline.planner.search.evaluate_named_layout import (
    cost_model_from_json,
    estimate_from_row,
    estimate_named,
    find_row,
)
from paceline.planner.search.search_space import SearchSpace
from paceline.planner.simulation.candidate_simulation import CandidateSimulation, simulate_candidate
from paceline.planner.simulation.failure_forecast import CheckpointCosts, FailureForecast, forecast_failures
from paceline.profiling.machine_benchmarks.machine_benchmark import probe_machine
from paceline.reporting.step_simulation_report import step_lines, write_step
from paceline.run_folder.plan_file import FILE_NAME, read_advice

ENTRY = "paceline.measured_planning.plan_worker:write_job_profile"
_MICRO_BATCH_SETTING = "train.micro_batch_size"
_MIN_CORRECTION = 1e-3  # the step time by the plan's timings is printed if it differs by more than this fraction


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """Simulate one step of a planned layout in virtual time, and estimate its goodput under failures."""

    job: Annotated[str, tyro.conf.Positional]
    """A job, a plan.json, or the folder of one."""
    cluster: str | None = None
    """here, 16x8xH100-80G@ib-ndr, or a TOML file; a plan.json has its own."""
    layout: str | None = None
    """fsdp, pp=8,tp=8,dp=2, ...; default: the recommended one."""
    ranks: int | None = None
    """With --cluster here: number of processes on this machine."""
    device: str = "auto"
    """With --cluster here: auto, cpu or cuda."""
    failures: str | None = None
    """Mean time between failures of one device: "50000 h"."""
    every: int | None = None
    """Steps between checkpoints; default: report the best interval only."""
    checkpoint_seconds: float = CheckpointCosts.stall_seconds
    """Seconds that training stops for a checkpoint."""
    write_seconds: float = CheckpointCosts.write_seconds
    """Seconds from the end of this stop until the checkpoint is safe; training continues meanwhile."""
    restart_seconds: float = CheckpointCosts.restart_seconds
    """Seconds from a failure until training continues."""
    page: Path | None = None
    """An HTML page to write; a name that ends in .svg gets the step's timeline only."""
    config: Path | None = None
    """A TOML file of settings."""
    run_dir: str | None = None
    """The folder for the log."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """The result of `simulate`; `value` holds the keys of `--json`."""

    exit_code: int
    text: str
    value: dict[str, Any] | None = None
    step: CandidateSimulation | None = None
    failure_forecast: FailureForecast | None = None


def simulate_from_options(options: SimulateOptions, settings: Sequence[str]) -> Simulation:
    """Run `simulate` with the options of the command line."""
    common = RunOptions(
        ranks=options.ranks,
        device=options.device,
        config=options.config,
        run_dir=options.run_dir,
        quiet=options.json,
    )
    return simulate(
        options.job,
        cluster=options.cluster,
        layout=options.layout,
        failures=options.failures,
        every=options.every,
        checkpoint_seconds=options.checkpoint_seconds,
        write_seconds=options.write_seconds,
        restart_seconds=options.restart_seconds,
        page=options.page,
        common=common,
        overrides=settings,
    )


def simulate(
    job: str | Path,
    *,
    cluster: str | None = None,
    layout: str | None = None,
    failures: str | None = None,
    every: int | None = None,
    checkpoint_seconds: float = CheckpointCosts.stall_seconds,
    write_seconds: float = CheckpointCosts.write_seconds,
    restart_seconds: float = CheckpointCosts.restart_seconds,
    page: str | Path | None = None,
    common: RunOptions | None = None,
    overrides: Sequence[str] = (),
) -> Simulation:
    """Simulate a step of the recommended layout, or of `layout`, in virtual time.

    `job` is a job, or a plan.json. `failures` is the mean time between failures of one device (`"50000 h"`): with it,
    the goodput is forecast for a checkpoint every `every` steps and for the best interval.

    Raises:
        UsageError, LayoutError, Problems: a cluster, a layout or a number is not valid.
    """
    if layout is not None:
        parse_layout(layout)
    if page is not None:
        check_writable(Path(page))
    mean_seconds = None if failures is None else parse_quantity(failures, kind=QuantityKind.TIME, name="--failures")
    checkpoints = CheckpointCosts(
        stall_seconds=checkpoint_seconds, write_seconds=write_seconds, restart_seconds=restart_seconds, every=every
    )
    if mean_seconds is None and every is not None:
        raise UsageError("--every has no effect without --failures.", hint='--failures "50000 h"')
    if _is_plan(Path(job)):
        if cluster is not None:
            raise UsageError(f"{job} is a plan, which has its own cluster.", hint=f"paceline simulate {job}")
        inputs: _SimulationInputs | CommandOutcome = _read_plan(Path(job), layout)
    elif Path(job).is_dir() and not is_hf_config(str(job)):
        raise UsageError(
            f"{job} is a folder without {FILE_NAME}, and it is not a model's folder.",
            cause="a plan that did not finish, or another kind of run folder",
            hint="paceline plan job.py --run-dir planned, then paceline simulate planned",
        )
    else:
        inputs = _profile_job(str(job), cluster or "here", layout, common or RunOptions(), overrides)
    if isinstance(inputs, CommandOutcome):
        return Simulation(exit_code=inputs.exit_code, text=inputs.screen)
    return _simulate_step(Path(job), inputs, mean_seconds, checkpoints, None if page is None else Path(page))


@dataclass(frozen=True, kw_only=True)
class _SimulationInputs:
    """The inputs of a simulation; `assumed` holds lines about values that were not requested."""

    cost_model: CostModel
    estimate: Estimate
    assumed: Sequence[str] = ()


def _simulate_step(
    job: Path, inputs: _SimulationInputs, mean_seconds: float | None, checkpoints: CheckpointCosts, page: Path | None
) -> Simulation:
    """Simulate a step, forecast failures, and write the page.

    If the plan has timed the layout, the timed step time differs from the one that the cost model estimates. The
    simulated step time is then multiplied by the ratio of the timed to the estimated one. The forecast of failures uses
    the product.
    """
    cost_model, estimate = inputs.cost_model, inputs.estimate
    step = simulate_candidate(cost_model, candidate=estimate.candidate)
    step = replace(step, estimate=replace(step.estimate, memory=estimate.memory))
    ratio = estimate.step_seconds / step.estimate.step_seconds
    failure_forecast, seconds, ranks = None, ratio * step.step_seconds, cost_model.cluster.ranks
    if mean_seconds is not None:
        failure_forecast = forecast_failures(
            step_seconds=seconds, ranks=ranks, device_mean_seconds=mean_seconds, checkpoints=checkpoints
        )
    timing_lines = _timing_lines(ratio, seconds, has_more=failure_forecast is not None)
    lines = [
        *step_lines(step, cost_model),
        *timing_lines,
        *(failure_forecast.lines() if failure_forecast else ()),
        *inputs.assumed,
    ]
    value = (
        step.as_json()
        | {"timed_step_seconds": seconds}
        | ({"failures": failure_forecast.as_json()} if failure_forecast else {})
    )
    if page is not None:
        replaced = page.exists()
        with report_write_errors(page):
            write_step(cost_model, step, failure_forecast, job=job.stem, to=page)
        value["page"] = str(page)
        lines.append(page_line(page, replaced=replaced))
    return Simulation(
        exit_code=int(ExitCode.DONE), text="\n".join(lines), value=value, step=step, failure_forecast=failure_forecast
    )


def _timing_lines(ratio: float, seconds: float, *, has_more: bool) -> Iterator[str]:
    """Yield a line with the step time by the plan's timings, if it differs from the simulated time.

    `ratio` is the timed step time divided by the estimated one. `seconds` is the simulated step time times `ratio`.
    """
    if abs(ratio - 1) > _MIN_CORRECTION:
        note = "; the lines below use this time" if has_more else ""
        duration = format_precise_duration(seconds)
        yield f"  by the plan's timings a step takes {duration}, {ratio:.2f} times the simulated time{note}"


def _is_plan(path: Path) -> bool:
    if path.is_file() and is_hf_config(str(path)):
        return False
    return path.suffix == ".json" or (path.is_dir() and (path / FILE_NAME).exists())


def _read_plan(path: Path, layout: str | None) -> _SimulationInputs:
    advice: Mapping[str, Any] = read_advice(path)
    cost_model = cost_model_from_json(advice)
    estimate = estimate_from_row(cost_model, find_row(advice)) if layout is None else estimate_named(cost_model, layout)
    return _SimulationInputs(cost_model=cost_model, estimate=estimate)


def _profile_job(
    job: str, cluster_text: str, layout: str | None, common: RunOptions, overrides: Sequence[str]
) -> _SimulationInputs | CommandOutcome:
    """Profile the job in another process; return the outcome of this process if it fails."""
    cluster: Cluster | None = None if cluster_text.strip() == "here" else parse_cluster(cluster_text)
    if cluster is not None:
        refuse_other_rank_count(common, cluster, cluster_text=cluster_text)
    job_reference, arguments, assumed = config_as_job(
        job, overrides, ranks=common.ranks or 1, cluster=cluster, file=common.config
    )
    if cluster is None:
        requested = make_task("simulate", job_reference, replace(common, layout=None), arguments)
        probe = probe_machine(ranks=requested.ranks, device=requested.device)
        cluster = measured_cluster(probe, ranks=requested.ranks, memory_bytes=available_memory(requested.device))
    task = make_task("simulate", job_reference, replace(common, layout="single", ranks=1, device="cpu"), arguments)
    task = assign_run_folder(replace(task, options={"ranks": cluster.ranks}), resume=None)
    outcome = execute(task, entry=ENTRY, common=replace(common, quiet=True))
    value = read_result(task, "simulate")
    if value is None:
        return outcome
    cost_model = CostModel(profile=model_profile_from_json(value), cluster=cluster)
    micro = int(task.settings[_MICRO_BATCH_SETTING]) if _MICRO_BATCH_SETTING in task.settings else None
    if layout is None:
        estimate = advise(cost_model, grid=SearchSpace(micro_batch_size=micro)).recommended
    else:
        estimate = estimate_named(cost_model, layout, micro_batch_size=micro)
    return _SimulationInputs(cost_model=cost_model, estimate=estimate, assumed=assumed)


def run_verb(options: SimulateOptions, settings: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    simulation = simulate_from_options(options, settings)
    return simulation.exit_code, simulation.value, simulation.text
