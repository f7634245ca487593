"""Automatic layouts (`--layout auto`): choose a layout and fallbacks for this machine before a run's workers start.

This module does not import torch. `auto_worker` makes the plan: in a process of its own, or in the script that opens a
`pl.Run`.
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
from paceline.config.merge_settings import as_command_text, settings_from_text
from paceline.config.parse_auto_layout import AUTO, is_auto
from paceline.config.task import Task
from paceline.config.update_rule import parse_update
from paceline.console.formatting import format_duration, format_size
from paceline.console.output import print_line
from paceline.errors import ExitCode, LayoutError, PacelineError, UsageError, raise_all
from paceline.filesystem.atomic_files import read_json
from paceline.launch.failures.failure_record import Failure
from paceline.launch.inherited_environment import attempt_folder
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.launcher_variables import detect_world
from paceline.launch.run_outcome import LaunchOutcome
from paceline.planner.layout.host_resources import usable_cores
from paceline.planner.search.layout_with_forecast import TIMED, LayoutForecast
from paceline.profiling.machine_benchmarks.this_machine import LocalMachine, benchmark_local_machine
from paceline.run_folder.run_folder import RunFolder, run_of_checkpoint

ENTRY = "paceline.measured_planning.auto_worker:write_choice"
CHOICE_FILE = "auto.json"
PLANNING_SECONDS = 20.0
ORIGIN = "auto"  # the origin of settings that a plan has chosen
MICRO_BATCH_ALLOWANCE = "micro_batch_size"  # the value of `--allow` with which a resumed run may change this setting
_MICRO_BATCH_SETTING = f"train.{MICRO_BATCH_ALLOWANCE}"


def refuse_auto_options(*, update: str, compress: str) -> None:
    """Refuse options for which `--layout auto` can't plan.

    Raises:
        LayoutError: the cost model does not cover an option.
        UsageError: a launcher has started the ranks already.
        Problems: there are several such errors.
    """
    problems: list[PacelineError] = []
    if not parse_update(update).has_cost_model:
        cause = "plans cover synchronous updates only"
        message = f"--layout auto with --update {update}: the step time of this update rule can't be forecast."
        hint = f"leave out --layout auto: --update {update} chooses the layout itself"
        problems.append(LayoutError(message, cause=cause, hint=hint))
    if str(parse_compress(compress)) != "none":
        message = f"--layout auto with --compress {compress}: compression needs ddp."
        problems.append(LayoutError(message, hint=f"--layout ddp --compress {compress}"))
    joined = None if attempt_folder(os.environ) else detect_world(os.environ)
    if joined is not None and joined.world_size > 1:
        problems.append(
            UsageError(
                f"--layout auto in a world that {joined.kind} started: the ranks exist before the plan.",
                cause="a plan is made in one process before the ranks start",
                hint=f"paceline plan JOB --ranks {joined.world_size}, then --layout with the recommended layout",
            )
        )
    raise_all(problems)


def resolve_auto_layout(task: Task, *, quiet: bool = False) -> tuple[Task, LaunchOutcome | None]:
    """Choose the layout of a task, and print it.

    It is the layout of the resumed run if that run had as many ranks, else a planned one. Return the task with this
    layout, and None. If planning fails, return the task unchanged, and the outcome of the planning process.
    """
    resumed = restore_auto_layout(task, quiet=quiet)
    if resumed is not None:
        return resumed, None
    machine = benchmark_local_machine(ranks=task.ranks, device=task.device)
    folder = RunFolder(Path(task.run) / AUTO)
    folder.path.mkdir(parents=True, exist_ok=True)
    if not quiet:
        print_line("auto: planning: profiling the model, searching, replaying the best layout", sys.stderr)
    planning_task = replace(
        make_planning_task(task),
        run=str(folder.path),
        options={"fleet": machine.cluster.as_json(), "seconds": PLANNING_SECONDS},
    )
    outcome = start(LaunchRequest(
        ranks=1, run=folder, entry=ENTRY, payload=planning_task.as_json(), threads=usable_cores(),
        saves_checkpoints=False,
    ))  # fmt: skip
    if outcome.exit_code:
        return task, outcome
    return print_choice(task, read_json(folder.path / CHOICE_FILE), machine, quiet=quiet), None


def make_planning_task(task: Task) -> Task:
    """Return the task of the planning process. If it resumes a run, it has that run's microbatch size."""
    settings = {**task.settings}
    if (earlier_folder := _resumed_folder(task)) is not None:
        with suppress(OSError, ValueError, KeyError, TypeError):
            settings.setdefault(_MICRO_BATCH_SETTING, read_json(earlier_folder / "plan.json")["micro_batch_size"])
    return replace(task, verb="plan", layout="single", ranks=1, device="cpu", faults="", resume=None, settings=settings)


def print_choice(task: Task, answer: Mapping[str, Any], machine: LocalMachine, *, quiet: bool = False) -> Task:
    """Print three lines about the chosen layout, and return the task with this layout and the fallbacks.

    `answer` is the result of `choose_layouts_to_try`.
    """
    # The key `rungs` of auto.json has the layouts to try: the recommended one, then its fallbacks.
    fallback_layouts = [LayoutForecast(**fallback) for fallback in answer["rungs"]]
    cost = f"planned in {format_duration(answer['seconds'])}"
    cost += f", after {format_duration(machine.seconds)} of measuring this machine" if machine.seconds else ""
    if fallback_layouts[0].source == TIMED:
        cost += "; paceline plan timed its steps here"
    elif fallback_layouts[0].longer != 1:
        cost += (
            f"; its step time is corrected: steps timed here took {fallback_layouts[0].longer:.2f} times the estimate"
        )
    else:
        cost += "; its step time is an estimate: paceline plan measures it"
    replay_note = f", NOT REPLAYED ({answer['unreplayed']})" if answer.get("unreplayed") else ""
    lines = [
        f"auto: {fallback_layouts[0]}, on {machine.cluster}{replay_note}",
        f"why: {answer['why']}; {cost}",
        f"second: {answer['second']}",
    ]
    _print_lines(lines, quiet=quiet)
    chosen = apply_layout(task, fallback_layouts)
    return replace(chosen, options={**chosen.options, "auto": lines})


def apply_layout(task: Task, layouts: Sequence[LayoutForecast]) -> Task:
    """Return the task with the first of these layouts, instead of its current layout, and the others as fallbacks."""
    first, *fallbacks = layouts
    layout_settings = settings_from_text(first.settings)
    overridden = {name for name in task.settings if task.origins.get(name) == ORIGIN} | set(layout_settings)
    other_settings = {name: value for name, value in task.settings.items() if name not in overridden}
    return replace(
        task,
        layout=first.layout,
        settings={**other_settings, **layout_settings},
        origins={
            **{name: task.origins[name] for name in other_settings if name in task.origins},
            **dict.fromkeys(layout_settings, ORIGIN),
        },
        options={**task.options, **_layout_options(first, fallbacks)},
    )


def _layout_options(first: LayoutForecast, fallbacks: Sequence[LayoutForecast]) -> dict[str, Any]:
    """Return the options of a task with this layout. Here the key `rungs` has only the fallbacks, without `first`."""
    return {"forecast": first.as_json(), "rungs": [fallback.as_json() for fallback in fallbacks]}


def next_fallback_task(task: Task, failure: Failure | None) -> Task | None:
    """Return the task with its next fallback layout, to resume from the run's newest checkpoint.

    A fallback is used after out-of-memory, and after the refusal of a layout that was recommended without a replay.
    Return None if no fallback is left, or if the failure has another cause.
    """
    fallbacks = [LayoutForecast(**fallback) for fallback in task.options.get("rungs", ())]
    if failure is None or not fallbacks:
        return None
    is_refused = failure.exit_code == ExitCode.REFUSED and not task.options["forecast"]["replayed"]
    if not (failure.is_short_of_memory or is_refused):
        return None
    first, run = fallbacks[0], RunFolder(Path(task.run))
    failed_bytes = task.options["forecast"]["peak_bytes"]
    if failure.requested_bytes > failed_bytes:  # another layout would not make this allocation fit
        return None
    newest = resolve_mark(run.checkpoints, LATEST)
    resume_text = f"from {newest.name}" if newest is not None else "from the first step (nothing had been saved)"
    reason = f"{task.layout} was refused" if is_refused else failure.message.rstrip(".")
    step_text = f" at step {failure.step}" if failure.step else ""
    print_line(
        f"rank {failure.rank}{step_text}: {reason}. auto: continuing {resume_text} with {first}, "
        f"which is forecast to need {format_size(first.peak_bytes)} instead of {format_size(failed_bytes)}",
        sys.stderr,
    )
    retry = apply_layout(task, fallbacks)
    if not has_saves(run.checkpoints):
        return replace(retry, resume=None)
    return replace(retry, resume="newest", allow=tuple(dict.fromkeys([*task.allow, MICRO_BATCH_ALLOWANCE])))


def _print_lines(lines: Sequence[str], *, quiet: bool) -> None:
    """Print to standard output, or with `quiet` to standard error."""
    print_line("\n".join(lines), sys.stderr if quiet else None)


def restore_auto_layout(task: Task, *, quiet: bool = False) -> Task | None:
    """Return the task with the layout of the run that it resumes, and print this layout.

    Return None if the task resumes no run, or a run with another number of ranks.
    """
    if (folder := _resumed_folder(task)) is None:
        return None
    try:
        earlier_task = Task.from_json(read_json(RunFolder(folder).task))
    except (OSError, ValueError, TypeError):
        return None
    if earlier_task.ranks != task.ranks or is_auto(earlier_task.layout):
        return None
    options: dict[str, Any] = {
        name: earlier_task.options[name] for name in ("forecast", "rungs") if name in earlier_task.options
    }
    auto_settings = {
        n: v
        for n, v in earlier_task.settings.items()
        if earlier_task.origins.get(n) == ORIGIN and n not in task.settings
    }
    setting_options = [f"--{name} {as_command_text(value)}" for name, value in auto_settings.items()]
    _print_lines(
        [f"auto: {' '.join([f'--layout {earlier_task.layout}', *setting_options])}, as in this run so far"], quiet=quiet
    )
    return replace(
        task,
        layout=earlier_task.layout,
        settings={**task.settings, **auto_settings},
        origins={**task.origins, **dict.fromkeys(auto_settings, ORIGIN)},
        options={**task.options, **options},
    )


def _resumed_folder(task: Task) -> Path | None:
    """Return the folder of the run that the task resumes, or None."""
    if task.resume is None:
        return None
    return Path(task.run) if task.resume == "newest" else run_of_checkpoint(Path(task.resume)).path
