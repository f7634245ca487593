"""The `plan` verb."""

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

from paceline.commands.command_table import Printed
from paceline.commands.common.dry_run import check_start
from paceline.commands.common.execution import (
    CommandOutcome,
    RunOptions,
    execute,
    failure_result,
    make_task,
    read_result,
    with_run,
)
from paceline.commands.common.hf_config_as_job import as_job
from paceline.commands.compare_layouts import page_line
from paceline.config.layout import parse_layout
from paceline.config.task import Task
from paceline.console.output import print_line
from paceline.errors import ExitCode, PacelineError, UsageError, raise_all
from paceline.filesystem.atomic_files import check_writable, report_write_errors
from paceline.launch.environments import detect_world
from paceline.planner.advice.plan_file_diff import diff_plan_files
from paceline.planner.hardware.cluster import Cluster, cluster_from_json
from paceline.planner.hardware.local_cluster import node_memory
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.search.evaluate_named_layout import find_row, mesh_for_plan
from paceline.profiling.machine_benchmarks.machine_benchmark import SECONDS as PROBE_SECONDS
from paceline.profiling.machine_benchmarks.this_machine import machine_here
from paceline.reporting.plan_report import write_plan
from paceline.run_folder.plan_file import NAME, read_advice, read_doing

ENTRY = "paceline.measured_planning.plan_worker:plan"
_LIFE_SECONDS = 10.0
_CALIBRATION_SECONDS = 60.0  # probe plus timed layouts, if `--seconds` is not given


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
    device: str = "auto"
    """With --cluster here: auto, cpu or cuda."""
    seconds: float | None = None
    """With --cluster here: seconds for timing layouts; 0 times none; default: 60, machine benchmark included."""
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
        options.job, cluster=options.cluster, layouts=options.layouts, against=options.against, page=options.page,
        seconds=options.seconds, common=common, overrides=settings,
    )  # fmt: skip


def plan(
    job: str,
    *,
    cluster: str = "here",
    layouts: Sequence[str] = (),
    against: str | Path | None = None,
    page: str | Path | None = None,
    seconds: float | None = None,
    common: RunOptions | None = None,
    overrides: Sequence[str] = (),
) -> CommandOutcome:
    """Return the layouts of a job that fit a cluster, their predicted memory and time, and why the others do not fit.

    `job` is a job, or a Hugging Face config: config.json, its folder, or `transformers:LlamaConfig`. `cluster` is
    `here` (with `ranks`), `8xH100-80G`, `4x8xA100-80G@ib-hdr`, or a TOML file. This machine is benchmarked once; then
    layouts are timed for at most `seconds`, by default a minute less the benchmark's time. `layouts` replaces the
    search: each one is judged and compared with the first. `against` is another plan.json to compare with. `page` is
    an HTML file to write.

    Raises:
        UsageError, Problems: a cluster or a setting can't be read; all problems at once.
    """
    common = common or RunOptions()
    named = [*layouts, *([common.layout] if common.layout else [])]
    _refuse_layouts(named, layouts=layouts)
    _refuse_seconds(seconds)
    if page is not None:
        check_writable(Path(page))
    before = None if against is None else _read_before(Path(against))
    fleet = None if cluster.strip() == "here" else parse_cluster(cluster)
    if fleet is not None:
        refuse_ranks(common, fleet, cluster=cluster)
    own = replace(common, layout=None) if fleet is None else replace(common, layout="single", ranks=1, device="cpu")
    stands, words, assumed = as_job(job, overrides, ranks=common.ranks or 1, fleet=fleet, file=common.config)
    task = make_task("plan", stands, own, words)
    _refuse_all(named, ranks=task.ranks if fleet is None else fleet.ranks)
    if common.dry_run:
        return CommandOutcome(exit_code=0, run=Path(task.run), value=task.as_json(), screen=check_start(task))
    options = {"fleet": fleet.as_json()} if fleet is not None else {"here": _here(task, seconds)}
    task = with_run(replace(task, options={**options, "layouts": named}), resume=None)
    if not common.quiet:
        _say_what_comes(seconds=options.get("here", {}).get("seconds", 0.0))
    outcome = _executed(task, common)
    value = read_result(task, "plan")
    if value is None:
        return outcome
    value["assumed"] = assumed
    lines = [*value.pop("lines"), *assumed, *_corrected(cluster_from_json(value["cluster"]))]
    if before is not None:
        value["against"] = list(diff_plan_files(before, value)) if value["recommended"] else []
        lines += [f"against {against}:", *(f"  {line}" for line in value["against"] or ["nothing fits"])]
    if page is not None:
        over = Path(page).exists()
        with report_write_errors(Path(page)):
            write_plan(value, job=Path(job).stem, to=Path(page))
        value["page"] = str(page)
        lines.append(page_line(Path(page), over=over))
    lines.append(f"full plan: {Path(task.run) / NAME}")
    code = outcome.exit_code or (ExitCode.REFUSED if value["recommended"] is None else ExitCode.DONE)
    return replace(outcome, exit_code=code, value=value, screen="\n".join(lines))


def _read_before(path: Path) -> dict[str, Any]:
    """Return an earlier plan.json, which must recommend a layout."""
    found = read_advice(path)
    find_row(found)
    return found


def _say_what_comes(*, seconds: float) -> None:
    more = f", and timing layouts for at most {seconds:.0f} s" if seconds else ""
    print_line(f"planning: profiling the model, searching, replaying the best layouts{more}", sys.stderr)


def _executed(task: Task, common: RunOptions) -> CommandOutcome:
    with nullcontext() if common.quiet else signs_of_life(Path(task.run)):
        return execute(task, entry=ENTRY, common=replace(common, quiet=True))


@contextmanager
def signs_of_life(run: Path, *, every: float = _LIFE_SECONDS) -> Iterator[None]:
    """Print on standard error every few seconds what the plan in this folder is doing, and how long it has run."""
    over, began = Event(), time.monotonic()

    def tell() -> None:
        while not over.wait(every):
            print_line(f"planning: {read_doing(run)}; {time.monotonic() - began:.0f} s so far", sys.stderr)

    teller = Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield
    finally:
        over.set()
        teller.join()


def refuse_ranks(common: RunOptions, fleet: Cluster, *, cluster: str) -> None:
    """Refuse a `--ranks` that differs from the cluster's number of ranks.

    Raises:
        UsageError: the numbers differ.
    """
    if common.ranks not in (None, fleet.ranks):
        raise UsageError(
            f"--ranks {common.ranks} contradicts --cluster {cluster}, which has {fleet.ranks:,} ranks.",
            cause="the cluster sets the number of ranks: one per device",
            hint=f"leave --ranks out, or --cluster {common.ranks}x{fleet.device.name}",
        )


def _refuse_layouts(named: Sequence[str], *, layouts: Sequence[str]) -> None:
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
            problems += getattr(error, "problems", [error])
    raise_all(problems)


def _refuse_all(named: Sequence[str], *, ranks: int) -> None:
    """Refuse the layouts if none fits this number of ranks, whatever the model; otherwise the plan reports each one."""
    problems = list[PacelineError]()
    for name in named:
        try:
            mesh_for_plan(parse_layout(name), ranks=ranks)
        except PacelineError as error:
            problems += getattr(error, "problems", [error])
        else:
            return
    raise_all(problems)


def _refuse_seconds(seconds: float | None) -> None:
    if seconds is not None and not 0 <= seconds < math.inf:
        what = f"--seconds {seconds:g} is not a valid time limit."
        raise UsageError(what, hint="--seconds 20; 0 times nothing")


def _here(task: Task, seconds: float | None, *, clock: Callable[[], float] = time.monotonic) -> dict[str, Any]:
    """Return the benchmark of this machine; under another launcher, the request with which the ranks measure it."""
    joined = detect_world(os.environ)
    if joined is not None:
        local, left = joined.local_world_size, _CALIBRATION_SECONDS - PROBE_SECONDS
        own = {"probe_seconds": PROBE_SECONDS, "ranks_per_node": local, "node_bytes": node_memory(task.device)}
        return {"seconds": left if seconds is None else seconds, **own}
    began = clock()
    fleet = machine_here(ranks=task.ranks, device=task.device).fleet.as_json()
    left = max(_CALIBRATION_SECONDS - (clock() - began), _CALIBRATION_SECONDS / 2)
    return {"seconds": left if seconds is None else seconds, "fleet": fleet}


def _corrected(fleet: Cluster) -> Iterator[str]:
    """Yield lines about the corrections of the forecast by earlier runs on this machine."""
    for what, ratios in (("times", fleet.longer), ("bytes", fleet.fuller)):
        said = ", ".join(f"{family or 'all others'} × {ratio:.2f}" for family, ratio in ratios.items())
        if said:
            yield f"{what} are corrected by the ratio of measurement to forecast in runs here: {said}"


def run_verb(options: PlanOptions, settings: list[str]) -> Printed:
    """Run the verb; return the exit code, what `--json` prints, and the text."""
    ended = failure_result(plan_from_options(options, settings))
    return ended.exit_code, ended.summary() if ended.value is None else ended.value, ended.screen
