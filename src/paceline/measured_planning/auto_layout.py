"""Automatic layouts (`--layout auto`): a plan for a run's machine, made before its workers start, with fallbacks.

It needs no torch: `auto_worker` makes the plan, in a process of its own or in the script that opens a `pl.Run`.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import LATEST, has_saves, resolve_mark
from paceline.config.compression import parse_compress
from paceline.config.loading import as_typed, settings_from_text
from paceline.config.parse_auto_layout import AUTO, is_auto
from paceline.config.task import Task
from paceline.config.update_rule import parse_update
from paceline.console.formatting import format_duration, format_size
from paceline.console.output import print_line
from paceline.errors import ExitCode, LayoutError, PacelineError, UsageError, raise_all
from paceline.filesystem.atomic_files import read_json
from paceline.launch.environments import detect_world
from paceline.launch.failures.failure_record import Failure
from paceline.launch.inherited_environment import attempt_folder
from paceline.launch.launcher import LaunchOutcome, LaunchRequest, start
from paceline.planner.layout.host_resources import usable_cores
from paceline.planner.search.layout_with_forecast import TIMED, FallbackLayout
from paceline.profiling.machine_benchmarks.this_machine import LocalMachine, machine_here
from paceline.run_folder.run_folder import RunFolder, run_of

ENTRY = "paceline.measured_planning.auto_worker:write_choice"
ANSWER = "auto.json"
SECONDS = 20.0
ORIGIN = "auto"
CUT = "micro_batch_size"  # the name to pass to `--allow`
_MICRO = f"train.{CUT}"


def refuse_auto(*, update: str, compress: str) -> None:
    """Refuse options that a plan does not model.

    Raises:
        UsageError, LayoutError, Problems
    """
    problems: list[PacelineError] = []
    if not parse_update(update).has_cost_model:
        cause = "plans cover synchronous updates only"
        what = f"--layout auto with --update {update}: its step time can't be forecast."
        problems.append(LayoutError(what, cause=cause, hint=f"use --update {update} alone, which chooses its layout"))
    if str(parse_compress(compress)) != "none":
        what = f"--layout auto with --compress {compress}: compression needs ddp."
        problems.append(LayoutError(what, hint=f"--layout ddp --compress {compress}"))
    joined = None if attempt_folder(os.environ) else detect_world(os.environ)
    if joined is not None and joined.world_size > 1:
        problems.append(
            UsageError(
                f"--layout auto in a world that {joined.kind} started: the ranks exist before the plan.",
                cause="a plan is made in one process before the ranks start",
                hint=f"paceline plan JOB --ranks {joined.world_size}, then --layout with its recommendation",
            )
        )
    raise_all(problems)


def resolve_auto_layout(task: Task, *, quiet: bool = False) -> tuple[Task, LaunchOutcome | None]:
    """Return the task with a layout: that of the resumed run if it had as many ranks, else the planned one.

    The planned layout is printed. If planning failed, the outcome of its process is returned too.
    """
    kept = as_before(task, quiet=quiet)
    if kept is not None:
        return kept, None
    here = machine_here(ranks=task.ranks, device=task.device)
    folder = RunFolder(Path(task.run) / AUTO)
    folder.path.mkdir(parents=True, exist_ok=True)
    if not quiet:
        print_line("auto: planning: profiling the model, searching, replaying the best layout", sys.stderr)
    own = replace(to_plan(task), run=str(folder.path), options={"fleet": here.fleet.as_json(), "seconds": SECONDS})
    outcome = start(LaunchRequest(
        ranks=1, run=folder, entry=ENTRY, payload=own.as_json(), threads=usable_cores(), saves_checkpoints=False
    ))  # fmt: skip
    if outcome.exit_code:
        return task, outcome
    return announce_choice(task, read_json(folder.path / ANSWER), here, quiet=quiet), None


def to_plan(task: Task) -> Task:
    """Return the task for planning in one process; a resumed run keeps its microbatch size."""
    settings = {**task.settings}
    if (begun := _begun(task)) is not None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            settings.setdefault(_MICRO, read_json(begun / "plan.json")["micro_batch_size"])
    return replace(task, verb="plan", layout="single", ranks=1, device="cpu", faults="", resume=None, settings=settings)


def announce_choice(task: Task, answer: Mapping[str, Any], here: LocalMachine, *, quiet: bool = False) -> Task:
    """Print three lines about the chosen layout, and return the task with it."""
    rungs = [FallbackLayout(**rung) for rung in answer["rungs"]]
    cost = f"planned in {format_duration(answer['seconds'])}"
    cost += f", after {format_duration(here.seconds)} of measuring this machine" if here.seconds else ""
    if rungs[0].source == TIMED:
        cost += "; paceline plan timed its steps here"
    elif rungs[0].longer != 1:
        cost += f"; times are corrected by steps timed here, {rungs[0].longer:.2f} times the estimate"
    else:
        cost += "; its step time is an estimate: paceline plan measures it"
    doubt = f", NOT REPLAYED ({answer['unreplayed']})" if answer.get("unreplayed") else ""
    lines = [
        f"auto: {rungs[0]}, on {here.fleet}{doubt}",
        f"why: {answer['why']}; {cost}",
        f"second: {answer['second']}",
    ]
    _say(lines, quiet=quiet)
    found = on_rung(task, rungs)
    return replace(found, options={**found.options, "auto": lines})


def on_rung(task: Task, rungs: Sequence[FallbackLayout]) -> Task:
    """Return the task with the first of these layouts, which overrides its own, and the others as fallbacks."""
    first, *rest = rungs
    own_settings = settings_from_text(first.settings)
    gone = {name for name in task.settings if task.origins.get(name) == ORIGIN} | set(own_settings)
    own = {name: value for name, value in task.settings.items() if name not in gone}
    return replace(
        task,
        layout=first.layout,
        settings={**own, **own_settings},
        origins={
            **{name: task.origins[name] for name in own if name in task.origins},
            **dict.fromkeys(own_settings, ORIGIN),
        },
        options={**task.options, **_remembered(first, rest)},
    )


def _remembered(first: FallbackLayout, rest: Sequence[FallbackLayout]) -> dict[str, Any]:
    return {"forecast": first.as_json(), "rungs": [rung.as_json() for rung in rest]}


def fallen_back(task: Task, failure: Failure | None) -> Task | None:
    """Return the task with its next fallback layout after out-of-memory, to resume from its newest checkpoint.

    Return None if no fallback is left, or if the failure has another cause. A layout that was recommended without a
    replay also falls back if it is refused.
    """
    rungs = [FallbackLayout(**rung) for rung in task.options.get("rungs", ())]
    if failure is None or not rungs:
        return None
    is_refused = failure.exit_code == ExitCode.REFUSED and not task.options["forecast"]["replayed"]
    if not (failure.is_short_of_memory or is_refused):
        return None
    first, run = rungs[0], RunFolder(Path(task.run))
    before = task.options["forecast"]["peak_bytes"]
    if failure.requested_bytes > before:  # no layout explains this allocation
        return None
    newest = resolve_mark(run.checkpoints, LATEST)
    place = f"from {newest.name}" if newest is not None else "from the first step, because nothing had been saved"
    why = f"{task.layout} was refused" if is_refused else failure.message.rstrip(".")
    at = f" at step {failure.step}" if failure.step else ""
    print_line(
        f"rank {failure.rank}{at}: {why}. auto: continuing {place} with {first}, which is forecast to need "
        f"{format_size(first.peak_bytes)} instead of {format_size(before)}",
        sys.stderr,
    )
    found = on_rung(task, rungs)
    if not has_saves(run.checkpoints):
        return replace(found, resume=None)
    return replace(found, resume="newest", allow=tuple(dict.fromkeys([*task.allow, CUT])))


def _say(lines: Sequence[str], *, quiet: bool) -> None:
    """Print to standard output, or to standard error if standard output belongs to a script."""
    print_line("\n".join(lines), sys.stderr if quiet else None)


def as_before(task: Task, *, quiet: bool = False) -> Task | None:
    """Return the task with the layout of the run that it resumes, if that run had as many ranks; else None."""
    if (folder := _begun(task)) is None:
        return None
    try:
        before = Task.from_json(read_json(RunFolder(folder).task))
    except (OSError, ValueError, TypeError):
        return None
    if before.ranks != task.ranks or is_auto(before.layout):
        return None
    options: dict[str, Any] = {name: before.options[name] for name in ("forecast", "rungs") if name in before.options}
    own = {n: v for n, v in before.settings.items() if before.origins.get(n) == ORIGIN and n not in task.settings}
    words = [f"--{name} {as_typed(value)}" for name, value in own.items()]
    _say([f"auto: {' '.join([f'--layout {before.layout}', *words])}, as in this run so far"], quiet=quiet)
    return replace(
        task,
        layout=before.layout,
        settings={**task.settings, **own},
        origins={**task.origins, **dict.fromkeys(own, ORIGIN)},
        options={**task.options, **options},
    )


def _begun(task: Task) -> Path | None:
    """Return the folder of the run that the task resumes, or None."""
    if task.resume is None:
        return None
    return Path(task.run) if task.resume == "newest" else run_of(Path(task.resume)).path
