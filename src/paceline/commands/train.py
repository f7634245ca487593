"""The `train` verb."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import LATEST, parse_step, resolve_mark
from paceline.commands.command_table import Printed, TrainOptions
from paceline.commands.common.dry_run import check_start
from paceline.commands.common.execution import (
    CommandOutcome,
    RunOptions,
    command_outcome,
    execute,
    failure_result,
    make_task,
    run_options,
    with_run,
)
from paceline.config.parse_auto_layout import AUTO, is_auto
from paceline.config.resume_allowances import refuse_unknown_allowances
from paceline.errors import ExitCode, UsageError, raise_all
from paceline.reporting.run_history import json_or_none, read_history
from paceline.reporting.sinks.console_lines import VERBOSE
from paceline.run_folder.run_folder import RunFolder

ENTRY = "paceline.trainer.entrypoints:train"


def train(
    job: str,
    *,
    common: RunOptions | None = None,
    overrides: Sequence[str] = (),
    resume: str | None = None,
    allow: Sequence[str] = (),
    evaluate_first: bool = False,
) -> CommandOutcome:
    """Train `job`; `resume=""` resumes its newest run, a path resumes that run.

    With the layout `auto` the job is planned first; if memory runs out, it falls back to a layout that needs less.
    """
    common = common or RunOptions()
    raise_all(refuse_unknown_allowances(tuple(allow)))
    chooses = is_auto(common.layout)
    if chooses:
        from paceline.measured_planning.auto_layout import fallen_back, refuse_auto, resolve_auto_layout

        refuse_auto(update=common.update, compress=common.compress)
    task = make_task("train", job, replace(common, layout=None) if chooses else common, overrides)
    if common.dry_run:
        task = replace(task, layout=AUTO) if chooses else task
        accepted = check_start(task, resume=resume)
        return CommandOutcome(exit_code=0, run=Path(task.run), value=task.as_json(), screen=accepted)
    task = with_run(task, resume=resume)
    task = replace(task, allow=tuple(allow), options={"evaluate_first": evaluate_first})
    if chooses:
        task, failed = resolve_auto_layout(task, quiet=common.quiet)
        if failed is not None:
            return command_outcome(replace(task, layout=AUTO), failed)
    outcome = execute(task, entry=ENTRY, common=common)
    while chooses and (then := fallen_back(task, outcome.failure)) is not None:
        task = then
        outcome = execute(task, entry=ENTRY, common=common)
    return outcome


def came_to(outcome: CommandOutcome) -> dict[str, Any]:
    """Return the last step, the last evaluation and, if it was written, the digest of a run that completed."""
    run = RunFolder(outcome.run)
    latest = resolve_mark(run.checkpoints, LATEST)
    if outcome.exit_code not in (ExitCode.DONE, ExitCode.STOPPED) or latest is None:
        return {}
    step, weights = parse_step(latest), json_or_none(run.path / "weights.json")
    found: dict[str, Any] = {"step": step, "evaluation": None, "digest": None}
    told = [event for event in read_history(run).events_of_kind("EvalDone") if event.get("step", step + 1) <= step]
    if told:
        found["evaluation"] = {name: told[-1].get(name) for name in ("step", "split", "metrics")}
    if outcome.exit_code == ExitCode.DONE and isinstance(weights, dict) and weights.get("step") == step:
        found["digest"] = weights.get("digest")
    return found


def run_verb(options: TrainOptions, settings: list[str]) -> Printed:
    """Run the verb; return the exit code, what `--json` prints, and the text."""
    allow = [name for name in options.allow.split(",") if name]
    if options.verbose:
        os.environ[VERBOSE] = "1"
    if options.resume is not None and not options.resume.strip():
        raise UsageError("--resume is empty: is a variable unset?", hint="--resume alone resumes the newest run")
    resume = "" if options.resume == "newest" else options.resume
    ended = train(
        options.job,
        common=run_options(options),
        overrides=settings,
        resume=resume,
        allow=allow,
        evaluate_first=options.evaluate_first,
    )
    if options.dry_run:
        return 0, ended.value, "\n".join([ended.screen, *(f"{k}: {v}" for k, v in (ended.value or {}).items())])
    ended = failure_result(ended)
    if not ended.tells:
        return ended.exit_code, None, ""
    value = {**ended.summary(), **(came_to(ended) if options.json else {})}
    return ended.exit_code, value, ended.screen or (f"run: {ended.run}" if ended.run.name else "")
