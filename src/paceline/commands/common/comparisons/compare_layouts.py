"""`compare JOB --layouts A B C`: trains the job in each layout, on the same samples in the same microbatches."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from paceline.commands.common.dry_run import check_start
from paceline.commands.common.execution import (
    CommandOutcome,
    RunOptions,
    execute,
    make_task,
    read_result,
)
from paceline.commands.common.start_folder import assign_run_folder
from paceline.config.job_reference import OBJECT_PREFIX, short_name
from paceline.config.layout import LayoutKind, parse_layout
from paceline.config.task import Task
from paceline.console.formatting import plural
from paceline.console.output import print_line
from paceline.errors import ExitCode, LayoutError, PacelineError, UsageError, list_problems, raise_all
from paceline.planner.layout.mesh import resolve_mesh
from paceline.reporting.layout_comparison import MeasuredLayout, comparison_text, write_layouts
from paceline.reporting.run_history import read_history
from paceline.run_folder.run_folder import RunFolder
from paceline.verification.rung_result import RECORDING_FLOOR, judge_distance

ENTRY = "paceline.measured_planning.timing.compare_layouts_worker:time_layout"
_REFUSED, _FAILED = "refused", "failed"
_THREADS_NOTE = "replicas are threads, so the memory is that between steps, without activations and messages"
_WARMUP_STEPS = 1  # steps that are not timed
_EXTRA_STEPS = 5  # more steps, which record the schedule and the memory
_VERIFY_LINE = "Verdicts compare losses with {first}. To compare gradients and weights too: "


@dataclass(frozen=True, kw_only=True)
class LayoutComparison:
    """The result of `compare --layouts`; its fields are the keys of `--json`."""

    exit_code: int
    text: str
    layouts: list[dict[str, Any]] = field(default_factory=list)
    page: str | None = None


def compare_layouts(
    job: str,
    *,
    layouts: Sequence[str],
    common: RunOptions,
    overrides: Sequence[str] = (),
    steps: int = 8,
    page: str | Path | None = None,
) -> LayoutComparison:
    """Train the job for a few steps in each layout and compare the layouts.

    The verdict on a layout compares its losses with those of the first entry of `layouts` whose run completed,
    even if another layout was trained earlier. A layout that does not fit the job becomes a row with the reason.

    Raises:
        PacelineError, Problems: a check before the start failed; the problems of all layouts are reported together.
    """
    tasks, refused = _make_tasks(job, layouts, common, overrides, steps)
    if common.dry_run:
        for task in tasks.values():
            check_start(task)
        return _dry_run_result(tasks, refused, layouts)
    outcomes: dict[str, tuple[Task, CommandOutcome]] = {}
    micro_batch_size: int | None = None
    for name, task in sorted(tasks.items(), key=lambda item: -num_replicas(item[1])):
        task = assign_run_folder(set_micro_batch_size(task, micro_batch_size), resume=None)
        if not common.quiet:
            print_line(f"{name}: {task.run}")
        outcome = execute(task, entry=ENTRY, common=replace(common, quiet=True))
        outcomes[name] = (task, replace(outcome, value=read_result(task, "compare")))
        micro_batch_size = micro_batch_size or (outcomes[name][1].value or {}).get("micro_batch_size")
    measured = _add_verdicts(
        [refused[name] if name in refused else _read_measurement(name, *outcomes[name], steps) for name in layouts]
    )
    verify_line = _verify_line(measured, job)
    replaced = page is not None and Path(page).exists()
    page_path = (
        None
        if page is None
        else write_layouts(measured, job=short_name(job), to=Path(page), verification_note=verify_line)
    )
    page_lines = [] if page_path is None else ["", page_line(page_path, replaced=replaced)]
    report_text = "\n".join([comparison_text(measured), *([verify_line] if verify_line else []), *page_lines])
    return LayoutComparison(
        exit_code=max(_exit_code(row) for row in measured),
        text=report_text,
        layouts=[_as_json(row, outcomes[row.name][0].run if row.name in outcomes else None) for row in measured],
        page=None if page_path is None else str(page_path),
    )


def _dry_run_result(
    tasks: dict[str, Task], refused: dict[str, MeasuredLayout], layouts: Sequence[str]
) -> LayoutComparison:
    lines = {name: plural(task.ranks, "rank") for name, task in tasks.items()}
    lines |= {name: row.reason for name, row in refused.items()}
    return LayoutComparison(
        exit_code=0,
        text="\n".join(f"{name}: {lines[name]}" for name in layouts),
        layouts=[tasks[name].as_json() if name in tasks else _as_json(refused[name], None) for name in layouts],
    )


def _verify_line(measured: Sequence[MeasuredLayout], job: str) -> str:
    """Return a line that says what the verdicts compare, with the command for a full verification."""
    completed = [row for row in measured if row.losses]
    candidates = [row for row in completed[1:] if row.name != "single"]
    if not candidates:
        return ""
    other = candidates[0]
    if job.startswith(f"{OBJECT_PREFIX}:"):
        return (
            f"{_VERIFY_LINE.format(first=completed[0].name)}pl.verify(job, layout={other.name!r}, ranks={other.ranks})"
        )
    return (
        f"{_VERIFY_LINE.format(first=completed[0].name)}"
        f"paceline verify {job} --layout {other.name} --ranks {other.ranks}"
    )


def _make_tasks(
    job: str, layouts: Sequence[str], common: RunOptions, overrides: Sequence[str], steps: int
) -> tuple[dict[str, Task], dict[str, MeasuredLayout]]:
    """Return the tasks to run, and a row for each layout that does not fit these ranks."""
    problems: list[PacelineError] = []
    if len(layouts) < 2:
        problems.append(UsageError(f"compare needs two layouts, got {len(layouts)}.", hint="--layouts single ddp"))
    problems += [
        UsageError(f"--layouts names {name} twice.", hint="name each layout once")
        for name in dict.fromkeys(layouts)
        if list(layouts).count(name) > 1
    ]
    if steps < _WARMUP_STEPS + 2:
        problems.append(
            UsageError(
                f"--steps {steps}: at least {_WARMUP_STEPS + 2} are needed, because {_WARMUP_STEPS} is a warm-up.",
                hint="--steps 8",
            )
        )
    if common.layout is not None:
        problems.append(UsageError("--layout and --layouts contradict each other.", hint="use --layouts alone"))
    last_step = steps + _EXTRA_STEPS
    after_last_step = str(last_step + 1)
    comparison_settings = [
        f"--train.steps={last_step}",
        "--log.every=1",
        f"--eval.every={after_last_step}",
        f"--checkpoint.every={after_last_step}",
    ]
    tasks: dict[str, Task] = {}
    refused: dict[str, MeasuredLayout] = {}
    for name in layouts:
        try:
            tasks[name] = _make_layout_task(job, name, common, [*overrides, *comparison_settings], steps)
        except PacelineError as error:
            errors = list_problems(error)
            if all(isinstance(problem, LayoutError) for problem in errors) and _is_layout(name):
                ranks = common.ranks or 1
                refused[name] = MeasuredLayout(name=name, ranks=ranks, verdict=_REFUSED, reason=_error_line(errors[0]))
            else:
                problems += [problem for problem in errors if str(problem) not in map(str, problems)]
    raise_all(problems)
    return tasks, refused


def _is_layout(name: str) -> bool:
    try:
        parse_layout(name)
    except PacelineError:
        return False
    return True


def _error_line(error: PacelineError) -> str:
    return " ".join(part for part in (error.what, error.cause and f"({error.cause})") if part)


def _make_layout_task(job: str, name: str, common: RunOptions, overrides: Sequence[str], steps: int) -> Task:
    is_single = parse_layout(name).kind is LayoutKind.SINGLE
    folder = None if common.run_dir is None else str(Path(common.run_dir) / name.replace("=", "").replace(",", "-"))
    options = replace(common, layout=name, ranks=1 if is_single else common.ranks, run_dir=folder)
    return replace(make_task("compare", job, options, overrides), options={"steps": steps})


def num_replicas(task: Task) -> int:
    """Return the replica count. The layout with most replicas runs first: all others use its microbatch size."""
    layout = parse_layout(task.layout)
    return (
        task.ranks
        if layout.kind is LayoutKind.THREADS
        else resolve_mesh(layout, ranks=task.ranks, problems=[]).replicas
    )


def set_micro_batch_size(task: Task, micro_batch_size: int | None) -> Task:
    """Return the task with this microbatch size, if its settings have none."""
    name = "train.micro_batch_size"
    if micro_batch_size is None or name in task.settings:
        return task
    return replace(
        task,
        settings={**task.settings, name: micro_batch_size},
        origins={**task.origins, name: "compare: the same for all"},
    )


def _read_measurement(name: str, task: Task, outcome: CommandOutcome, steps: int) -> MeasuredLayout:
    if outcome.value is None:
        is_refused = outcome.exit_code == ExitCode.REFUSED
        reason = str(
            outcome.json_fields.get("what") or outcome.screen or f"exit code {outcome.exit_code}"
        ).splitlines()[0]
        return MeasuredLayout(name=name, ranks=task.ranks, verdict=_REFUSED if is_refused else _FAILED, reason=reason)
    history = read_history(RunFolder(Path(task.run)))
    ranks = outcome.value["ranks"]
    schedule = outcome.value.get("schedule") or {}

    def median_of(metric: str) -> float | None:
        values = [value for step, value in history.points(metric) if _WARMUP_STEPS < step <= steps]
        return median(values) if values else None

    return MeasuredLayout(
        name=name,
        ranks=task.ranks,
        step_seconds=median_of("time/step"),
        samples_per_second=median_of("samples_per_second"),
        tokens_per_second=median_of("tokens_per_second"),
        memory_by_rank=[rank["peak_bytes"] for rank in ranks],
        sent_by_rank=[rank["sent_bytes"] for rank in ranks],
        losses=[(step, loss) for step, loss in history.points("loss") if step <= steps + 1],
        bubble=schedule.get("bubble"),
        planned_bubble=schedule.get("planned"),
        schedule=schedule.get("picture", ""),
        notes=() if all(rank["is_peak_measured"] for rank in ranks) else (_THREADS_NOTE,),
    )


def _add_verdicts(measured: list[MeasuredLayout]) -> list[MeasuredLayout]:
    first = next((row for row in measured if row.losses), None)
    if first is None:
        return measured
    losses = dict(first.losses)
    return [
        replace(row, verdict="reference" if row is first else _verdict(row, losses)) if row.losses else row
        for row in measured
    ]


def _verdict(layout: MeasuredLayout, reference: dict[float, float]) -> str:
    distance = max(
        (
            abs(loss - reference[step]) / max(abs(reference[step]), 1e-30)
            for step, loss in layout.losses
            if step in reference
        )
    )
    return judge_distance(distance, RECORDING_FLOOR)


def _exit_code(layout: MeasuredLayout) -> int:
    codes = {"different": ExitCode.DIFFERENT, _REFUSED: ExitCode.DONE, _FAILED: ExitCode.FAILED}
    return int(codes.get(layout.verdict, ExitCode.DONE))


def _as_json(layout: MeasuredLayout, run: str | None) -> dict[str, Any]:
    return {
        "layout": layout.name,
        "ranks": layout.ranks,
        "run": run,
        "verdict": layout.verdict,
        "reason": layout.reason,
        "step_seconds": layout.step_seconds,
        "samples_per_second": layout.samples_per_second,
        "tokens_per_second": layout.tokens_per_second,
        "peak_bytes": [dict(rank) for rank in layout.memory_by_rank],
        "sent_bytes": [dict(rank) for rank in layout.sent_by_rank],
        "bubble": layout.bubble,
        "bubble_planned": layout.planned_bubble,
        "losses": [loss for _, loss in layout.losses],
    }


def page_line(page: Path, *, replaced: bool) -> str:
    """Return the page's path, with a note if it replaced an earlier page."""
    return f"{page} (replaced the earlier page; --page FILE keeps both)" if replaced else str(page)


def refuse_mixed_arguments(runs: Sequence[str], settings: Sequence[str]) -> None:
    """Refuse arguments that belong to the other form of `compare`.

    Raises:
        UsageError: runs are compared, and settings were given.
        LayoutError: a job was given without `--layouts`.
    """
    if settings:
        raise UsageError(f"compare of runs takes no settings, got {settings[0]}.", hint="compare JOB --layouts A B")
    if len(runs) == 1 and runs[0].partition(":")[0].endswith(".py"):
        raise LayoutError(
            f"compare {runs[0]}: --layouts is missing.", hint=f"paceline compare {runs[0]} --layouts single ddp"
        )
