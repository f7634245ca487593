"""The `train` verb: trains a job, or resumes a run."""

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import LATEST, parse_step, resolve_mark
from paceline.checkpoint.files.remote_store import check_remote_url, is_remote_url
from paceline.commands.command_table import TrainOptions, VerbOutput
from paceline.commands.common.dry_run import check_start, start_lines
from paceline.commands.common.execution import (
    CommandOutcome,
    RunOptions,
    command_outcome,
    execute,
    failure_result,
    make_task,
    run_options,
)
from paceline.commands.common.layout_problems import node_counts
from paceline.commands.common.local_nodes import played_place, run_local_nodes
from paceline.commands.common.node_start import NodeStart, tell_head, training_place
from paceline.commands.common.resume_command import build_resume_command
from paceline.commands.common.start_folder import assign_run_folder
from paceline.config.merge_settings import merge_without_job
from paceline.config.parse_auto_layout import AUTO, is_auto
from paceline.config.resume_allowances import refuse_unknown_allowances
from paceline.config.task import Task
from paceline.console.output import print_line
from paceline.errors import ExitCode, PacelineError, UsageError, raise_all
from paceline.nodes.node_place import NodePlace
from paceline.reporting.run_history import json_or_none, read_history
from paceline.reporting.sinks.console_lines import VERBOSE
from paceline.run_folder.run_folder import RunFolder, check_resume

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
    """Train `job`. `resume` is the path of a run to resume, or "" for the newest run of the job.

    With the layout `auto`, the job is planned first. If memory runs out, the run continues in a layout that needs less
    memory.
    """
    common = common or RunOptions()
    _check_words(resume, allow)
    is_auto_layout = is_auto(common.layout)
    if is_auto_layout:
        from paceline.measured_planning.auto_layout import (
            next_fallback_task,
            refuse_auto_options,
            resolve_auto_layout,
        )

        refuse_auto_options(update=common.update, compress=common.compress)
    try:
        task, counts = _make_train_task(job, common, overrides, resume=resume)
    except PacelineError as error:
        if common.place is not None and not common.dry_run:
            tell_head(common.place, error)
        raise
    if common.dry_run:
        task = replace(task, layout=AUTO) if is_auto_layout else task
        summary = check_start(task, resume=resume)
        return CommandOutcome(exit_code=0, run=Path(task.run), value=task.as_json(), screen=summary)
    task = replace(task, allow=tuple(allow), options={"evaluate_first": evaluate_first})
    if common.place is not None:
        return _train_on_nodes(task, counts, common=common, place=common.place, resume=resume)
    task = assign_run_folder(task, resume=resume)
    if is_auto_layout:
        task, failed_launch = resolve_auto_layout(task, quiet=common.quiet)
        if failed_launch is not None:
            return command_outcome(replace(task, layout=AUTO), failed_launch)
    outcome = execute(task, entry=ENTRY, common=common)
    while is_auto_layout and (fallback := next_fallback_task(task, outcome.failure)) is not None:
        task = fallback
        outcome = execute(task, entry=ENTRY, common=common)
    return outcome


def _check_words(resume: str | None, allow: Sequence[str]) -> None:
    raise_all(refuse_unknown_allowances(tuple(allow)))
    if resume is not None and is_remote_url(resume):
        check_remote_url(resume, name="resume")


def _make_train_task(
    job: str, common: RunOptions, overrides: Sequence[str], *, resume: str | None
) -> tuple[Task, tuple[int, ...]]:
    """Return the task, and the numbers of nodes with which it may run if there are several.

    What to resume is then checked here, before the nodes wait for each other.

    Raises:
        PacelineError, Problems: a check failed.
    """
    if common.place is not None and is_auto(common.layout):
        hint = "paceline plan, then its layout"
        raise UsageError("--layout auto can't be chosen on several nodes yet.", hint=hint)
    task = make_task("train", job, replace(common, layout=None) if is_auto(common.layout) else common, overrides)
    if common.place is None:
        return task, ()
    if not common.dry_run:  # whose own check says more
        check_resume(task.short_job, run=task.run, resume=resume)
    return task, node_counts(task, common.place, merge_without_job(task.settings))


def _train_on_nodes(
    task: Task, counts: tuple[int, ...], *, common: RunOptions, place: NodePlace, resume: str | None
) -> CommandOutcome:
    """Train on several nodes: as the head, or as another node, whose outcome has only a text.

    `counts` has the numbers of nodes with which the run may train.
    """
    line = build_resume_command(task) if task.run and not place.is_played else ""
    start = NodeStart(place, task, node_counts=counts, resume=resume, resume_command=line)
    start.check_interface()
    if not start.is_head():
        code, text = start.run_member()
        json_fields = {"what": text} if code else {}
        return CommandOutcome(exit_code=code, run=Path(task.run), screen=text, json_fields=json_fields)
    with start.lead() as nodes:
        task = assign_run_folder(task, resume=resume)
        outcome = execute(task, entry=ENTRY, common=common, nodes=nodes)
        text = outcome.screen.partition("\n")[0] or "done"
        nodes.end(outcome.exit_code, text.partition(" Resume: ")[0] if place.is_played else text)
    return outcome


def read_training_result(outcome: CommandOutcome) -> dict[str, Any]:
    """Return the last step, the last evaluation and the digest of a run that completed or was stopped.

    The digest is None if it was not written for this step. The result is empty if the run failed.
    """
    run = RunFolder(outcome.run)
    latest = resolve_mark(run.checkpoints, LATEST)
    if outcome.exit_code not in (ExitCode.DONE, ExitCode.STOPPED) or latest is None:
        return {}
    step, weights = parse_step(latest), json_or_none(run.path / "weights.json")
    result: dict[str, Any] = {"step": step, "evaluation": None, "digest": None}
    evaluations = [
        event for event in read_history(run).events_of_kind("EvalDone") if event.get("step", step + 1) <= step
    ]
    if evaluations:
        result["evaluation"] = {name: evaluations[-1].get(name) for name in ("step", "split", "metrics")}
    if outcome.exit_code == ExitCode.DONE and isinstance(weights, dict) and weights.get("step") == step:
        result["digest"] = weights.get("digest")
    return result


def run_verb(options: TrainOptions, settings: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    allow = [name for name in options.allow.split(",") if name]
    if options.verbose:
        os.environ[VERBOSE] = "1"
    if options.resume is not None and not options.resume.strip():
        raise UsageError("--resume is empty: is a variable unset?", hint="--resume alone resumes the newest run")
    resume = "" if options.resume == "newest" else options.resume
    if (played := played_place(options)) is not None:
        _check_words(resume, allow)
        common = replace(run_options(options), place=played, ranks_per_node=options.ranks_per_node)
        task, _ = _make_train_task(
            options.job, common, settings, resume=resume
        )  # refuses once, before a network is made
        if options.dry_run:
            return 0, task.as_json(), "\n".join([check_start(task, resume=resume), *start_lines(task)])
        line = build_resume_command(task)
        can_return = played.is_elastic or bool(merge_without_job(task.settings).nodes.restarts)
        code = run_local_nodes(played.num_nodes, options, settings, resume_command=line, can_return=can_return)
        return code, None, ""
    place = training_place(options)
    if place is not None and place.is_extra_task:
        return 0, None, ""
    common = run_options(options)
    if place is not None and place.num_nodes == 1:
        if options.nodes is not None:
            text = f"--nodes {options.nodes}: this machine is the whole run; --nodes 2:{place.head_host} for two"
            print_line(f"{text}, the same line on both", sys.stderr)
        common = replace(common, ranks=common.ranks or options.ranks_per_node)
    elif place is not None:
        common = replace(common, place=place, ranks_per_node=options.ranks_per_node)
    outcome = train(
        options.job,
        common=common,
        overrides=settings,
        resume=resume,
        allow=allow,
        evaluate_first=options.evaluate_first,
    )
    if options.dry_run:
        lines = start_lines(Task.from_json(outcome.value or {}))
        return 0, outcome.value, "\n".join([outcome.screen, *lines])
    outcome = failure_result(outcome)
    if not outcome.prints_result:
        return outcome.exit_code, None, ""
    value = {**outcome.summary(), **(read_training_result(outcome) if options.json else {})}
    return outcome.exit_code, value, outcome.screen or (f"run: {outcome.run}" if outcome.run.name else "")
