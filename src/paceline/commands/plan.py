"""The `plan` verb: finds the layouts of a job that fit a cluster, and predicts their memory and time."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Annotated, Any

import tyro

from paceline.commands.command_table import VerbOutput
from paceline.commands.common.comparisons.compare_layouts import page_line
from paceline.commands.common.dry_run import check_start
from paceline.commands.common.execution import (
    CommandOutcome,
    RunOptions,
    execute,
    failure_result,
    make_task,
    read_result,
)
from paceline.commands.common.hf_config_as_job import config_as_job, is_hf_config
from paceline.commands.common.nodes_like_this import NodesLikeThis, read_nodes_like_this
from paceline.commands.common.start_folder import assign_run_folder
from paceline.config.layout import parse_layout
from paceline.config.task import Task
from paceline.console.output import print_line
from paceline.errors import ExitCode, PacelineError, UsageError, list_problems, raise_all
from paceline.filesystem.atomic_files import check_writable, report_write_errors
from paceline.launch.launcher_variables import detect_world
from paceline.planner.advice.plan_file_diff import diff_plan_files
from paceline.planner.hardware.cluster import Cluster, cluster_from_json
from paceline.planner.hardware.local_cluster import available_memory
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.search.evaluate_named_layout import find_row, mesh_for_plan
from paceline.profiling.machine_benchmarks.machine_benchmark import BENCHMARK_SECONDS
from paceline.profiling.machine_benchmarks.this_machine import benchmark_local_machine
from paceline.reporting.plan_report import write_plan_report
from paceline.run_folder.plan_file import FILE_NAME, read_activity, read_advice

ENTRY = "paceline.measured_planning.plan_worker:plan"
_PROGRESS_SECONDS = 10.0
_CALIBRATION_SECONDS = 60.0  # the machine benchmark and the timing of layouts together, if `--seconds` is not given


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Find which layouts of a job fit, how fast they are, and why the others do not fit."""

    job: Annotated[str, tyro.conf.Positional]
    """A job, or a Hugging Face config: config.json, its folder, or transformers:LlamaConfig."""
    cluster: str = "here"
    """here, 8xH100-80G, 4x8xA100-80G@eth-100g, or a TOML file with nodes, devices, links and prices."""
    layout: str | None = None
    """Judge this layout instead of searching: fsdp, pp=2,dp_shard=4,remat=full, ..."""
    layouts: tuple[str, ...] = ()
    """Judge these layouts and compare them: --layouts fsdp pp=2,dp=4."""
    against: Path | None = None
    """A plan.json or its folder: compare with its recommended layout."""
    page: Path | None = None
    """An HTML page to write, with pictures of the layouts."""
    ranks: int | None = None
    """With --cluster here: number of processes on this machine."""
    nodes: int | None = None
    """Plan for N machines like this one, with `--link` between them; default: as many as are in the file of `--link`.
    No layout is timed then."""
    ranks_per_node: int | None = None
    """With --nodes: number of processes on each machine; default: one per GPU, or 1."""
    link: str | None = None
    """The link between two machines: 20Mbit/s or eth-10g, with --nodes; or the file from `paceline doctor --json`."""
    device: str = "auto"
    """With --cluster here: auto, cpu or cuda."""
    seconds: float | None = None
    """With --cluster here: seconds for timing layouts; 0: no timing; default: 60 minus the time of the machine
    benchmark, but at least 30."""
    config: Path | None = None
    """A TOML file of settings."""
    run_dir: str | None = None
    """The folder for the plan and its log."""
    dry_run: bool = False
    """Check what can be checked without importing the job, and start nothing."""
    json: bool = False
    """Print the plan as JSON."""


def plan_from_options(options: PlanOptions, settings: Sequence[str]) -> CommandOutcome:
    """Run `plan` with the options of the command line."""
    common = RunOptions(
        ranks=options.ranks,
        layout=options.layout,
        device=options.device,
        config=options.config,
        run_dir=options.run_dir,
        dry_run=options.dry_run,
        quiet=options.json,
    )
    return plan(
        options.job, cluster=options.cluster, nodes=options.nodes, ranks_per_node=options.ranks_per_node,
        link=options.link, layouts=options.layouts, against=options.against, page=options.page,
        seconds=options.seconds, common=common, overrides=settings,
    )  # fmt: skip


def plan(
    job: str,
    *,
    cluster: str = "here",
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    link: str | None = None,
    layouts: Sequence[str] = (),
    against: str | Path | None = None,
    page: str | Path | None = None,
    seconds: float | None = None,
    common: RunOptions | None = None,
    overrides: Sequence[str] = (),
) -> CommandOutcome:
    """Return the layouts of a job that fit a cluster, their predicted memory and time, and why the others do not fit.

    `job` is a job, or a Hugging Face config: config.json, its folder, or `transformers:LlamaConfig`. `cluster` is
    `here` (with `ranks`), `8xH100-80G`, `4x8xA100-80G@ib-hdr`, or a TOML file. For `here`, this machine is
    benchmarked once, and layouts are timed for at most `seconds` (see `PlanOptions`). With `nodes`, the cluster is that
    many machines like this one, with `link` between them. `layouts` replaces the search: each is judged and compared
    with the first. `against` is a plan.json to compare with, `page` an HTML file to write.

    Raises:
        PacelineError, Problems: an argument or a setting is invalid.
    """
    common = common or RunOptions()
    named_layouts = [*layouts, *([common.layout] if common.layout else [])]
    _refuse_invalid_layouts(named_layouts, layouts=layouts)
    _refuse_seconds(seconds)
    if page is not None:
        check_writable(Path(page))
    earlier_plan = None if against is None else _read_earlier_plan(Path(against))
    machines = read_nodes_like_this(
        nodes=nodes, ranks_per_node=ranks_per_node, link=link, ranks=common.ranks, cluster=cluster
    )
    target = _parse_target(cluster, common)
    task, assumed = _make_plan_task(job, target, machines, named_layouts, common=common, overrides=overrides)
    if common.dry_run:
        return CommandOutcome(exit_code=0, run=Path(task.run), value=task.as_json(), screen=check_start(task))
    requested = task
    task = _with_cluster(task, target, machines, named_layouts, seconds=seconds)
    if not common.quiet:
        _print_start(seconds=task.options.get("here", {}).get("seconds", 0.0))
    outcome = _execute_plan(task, common)
    value = read_result(task, "plan")
    if value is None:
        return outcome
    value["assumed"] = assumed
    lines = [*value.pop("lines"), *assumed, *_correction_lines(cluster_from_json(value["cluster"]))]
    if earlier_plan is not None:
        value["against"] = list(diff_plan_files(earlier_plan, value)) if value["recommended"] else []
        lines += [f"against {against}:", *(f"  {line}" for line in value["against"] or ["nothing fits"])]
    if page is not None:
        lines.append(_write_page(value, job=Path(job).stem, to=Path(page)))
    lines.append(f"full plan: {Path(task.run) / FILE_NAME}")
    if machines is not None and value["recommended"] is not None and not is_hf_config(job):
        value["command"] = machines.train_command(requested, find_row(value))
        lines.append(f"to train{machines.placeholder_text}, {value['command']}")
    code = outcome.exit_code or (ExitCode.REFUSED if value["recommended"] is None else ExitCode.DONE)
    return replace(outcome, exit_code=code, value=value, screen="\n".join(lines))


def _parse_target(cluster: str, common: RunOptions) -> Cluster | None:
    """Return the cluster to plan for; None for this machine."""
    if cluster.strip() == "here":
        return None
    target = parse_cluster(cluster)
    refuse_other_rank_count(common, target, cluster_text=cluster)
    return target


def _make_plan_task(
    job: str,
    target: Cluster | None,
    machines: NodesLikeThis | None,
    named_layouts: Sequence[str],
    *,
    common: RunOptions,
    overrides: Sequence[str],
) -> tuple[Task, Sequence[str]]:
    """Return the task, whose ranks are those of this machine unless `target` is another cluster, and what was assumed.

    Raises:
        PacelineError, Problems: a check failed, or none of the named layouts fits the number of ranks.
    """
    num_nodes, ranks_here = (machines.num_nodes, machines.ranks_per_node) if machines else (1, common.ranks)
    one_process = replace(common, layout="single", ranks=1, device="cpu")  # enough to plan for another cluster
    run_options = replace(common, layout=None, ranks=ranks_here) if target is None else one_process
    ranks = num_nodes * (ranks_here or 1)
    ref, arguments, assumed = config_as_job(job, overrides, ranks=ranks, cluster=target, file=common.config)
    task = make_task("plan", ref, run_options, arguments)
    _refuse_misfit_layouts(named_layouts, ranks=num_nodes * task.ranks if target is None else target.ranks)
    return task, assumed


def _with_cluster(
    task: Task, target: Cluster | None, machines: NodesLikeThis | None, layouts: Sequence[str], *, seconds: float | None
) -> Task:
    """Return the task with its run folder, the named layouts, and the cluster, which is measured if it is not given."""
    if machines is not None:
        target = machines.measure(ranks_per_node=task.ranks, device=task.device)
        task = replace(task, layout="single", ranks=1, device="cpu")
    options = {"fleet": target.as_json()} if target is not None else {"here": _local_machine(task, seconds)}
    return assign_run_folder(replace(task, options={**options, "layouts": list(layouts)}), resume=None)


def _write_page(value: dict[str, Any], *, job: str, to: Path) -> str:
    """Write the page of the plan, and add its path to the plan; return the line to print."""
    replaced = to.exists()
    with report_write_errors(to):
        write_plan_report(value, job=job, to=to)
    value["page"] = str(to)
    return page_line(to, replaced=replaced)


def _read_earlier_plan(path: Path) -> dict[str, Any]:
    """Return an earlier plan.json, which must recommend a layout."""
    earlier_plan = read_advice(path)
    find_row(earlier_plan)
    return earlier_plan


def _print_start(*, seconds: float) -> None:
    timing_text = f", and timing layouts for at most {seconds:.0f} s" if seconds else ""
    print_line(f"planning: profiling the model, searching, replaying the best layouts{timing_text}", sys.stderr)


def _execute_plan(task: Task, common: RunOptions) -> CommandOutcome:
    with nullcontext() if common.quiet else report_progress(Path(task.run)):
        return execute(task, entry=ENTRY, common=replace(common, quiet=True))


@contextmanager
def report_progress(run: Path, *, every: float = _PROGRESS_SECONDS) -> Iterator[None]:
    """Return a context that prints, every `every` seconds on standard error, the activity of the plan in `run`."""
    finished, start_time = Event(), time.monotonic()

    def print_progress() -> None:
        while not finished.wait(every):
            print_line(f"planning: {read_activity(run)}; {time.monotonic() - start_time:.0f} s so far", sys.stderr)

    thread = Thread(target=print_progress, daemon=True)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def refuse_other_rank_count(common: RunOptions, cluster: Cluster, *, cluster_text: str) -> None:
    """Refuse a `--ranks` that differs from the cluster's number of ranks.

    Raises:
        UsageError: the numbers differ.
    """
    if common.ranks not in (None, cluster.ranks):
        raise UsageError(
            f"--ranks {common.ranks} contradicts --cluster {cluster_text}, which has {cluster.ranks:,} ranks.",
            cause="the cluster sets the number of ranks: one per device",
            hint=f"leave --ranks out, or --cluster {common.ranks}x{cluster.device.name}",
        )


def _refuse_invalid_layouts(named: Sequence[str], *, layouts: Sequence[str]) -> None:
    """Refuse layouts that can't be parsed, before anything runs."""
    problems: list[PacelineError] = []
    if layouts and len(named) > len(layouts):
        problems.append(UsageError("--layout and --layouts contradict each other.", hint="use --layouts alone"))
    problems += [
        UsageError(f"--layouts names {name} twice.", hint="name each layout once")
        for name in dict.fromkeys(named)
        if list(layouts).count(name) > 1
    ]
    for name in named:
        try:
            parse_layout(name)
        except PacelineError as error:
            problems += list_problems(error)
    raise_all(problems)


def _refuse_misfit_layouts(named: Sequence[str], *, ranks: int) -> None:
    """Refuse the layouts if none of them fits the number of ranks. Otherwise, the plan says which ones do not fit."""
    problems = list[PacelineError]()
    for name in named:
        try:
            mesh_for_plan(parse_layout(name), ranks=ranks)
        except PacelineError as error:
            problems += list_problems(error)
        else:
            return
    raise_all(problems)


def _refuse_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0 <= seconds < math.inf:
        message = f"--seconds {seconds:g} is not a valid time limit."
        raise UsageError(message, hint="--seconds 20; 0 switches timing off")


def _local_machine(task: Task, seconds: float | None, *, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Return this machine's cluster and the seconds for timing layouts, as the `here` option of the plan's task.

    Under another launcher, the option contains no cluster. It asks the ranks to benchmark the machine.
    """
    joined = detect_world(os.environ)
    if joined is not None:
        ranks_per_node, timing_seconds = joined.local_world_size, _CALIBRATION_SECONDS - BENCHMARK_SECONDS
        benchmark_request = {
            "probe_seconds": BENCHMARK_SECONDS,
            "ranks_per_node": ranks_per_node,
            "node_bytes": available_memory(task.device),
        }
        return {"seconds": timing_seconds if seconds is None else seconds, **benchmark_request}
    start_time = clock()
    cluster = benchmark_local_machine(ranks=task.ranks, device=task.device).cluster.as_json()
    timing_seconds = max(_CALIBRATION_SECONDS - (clock() - start_time), _CALIBRATION_SECONDS / 2)
    return {"seconds": timing_seconds if seconds is None else seconds, "fleet": cluster}


def _correction_lines(cluster: Cluster) -> Iterator[str]:
    """Yield lines about the corrections of the forecast by earlier runs on this machine."""
    for quantity, ratios in (("times", cluster.longer), ("bytes", cluster.fuller)):
        text = ", ".join(f"{family or 'all others'} × {ratio:.2f}" for family, ratio in ratios.items())
        if text:
            yield f"{quantity} are corrected by the ratio of measurement to forecast in runs here: {text}"


def run_verb(options: PlanOptions, settings: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    outcome = failure_result(plan_from_options(options, settings))
    return outcome.exit_code, outcome.summary() if outcome.value is None else outcome.value, outcome.screen
