"""The `evaluate` verb: computes the exact metrics of a checkpoint."""

import os
from contextlib import suppress
from dataclasses import replace

from paceline.checkpoint.files.checkpoint_folder import BEST, resolve_mark
from paceline.commands.command_table import EvaluateOptions, VerbOutput
from paceline.commands.common.execution import CommandOutcome, RunOptions, execute, failure_result
from paceline.config.job_reference import parse_jobref
from paceline.config.layout import LayoutKind, parse_layout
from paceline.config.parse_auto_layout import AUTO
from paceline.config.task import Task
from paceline.config.update_rule import UpdateRule
from paceline.console.formatting import format_metric, plural
from paceline.console.output import print_line
from paceline.errors import PacelineError, UsageError, raise_all
from paceline.filesystem.atomic_files import read_json, write_json
from paceline.filesystem.temporary_folders import scratch_folder
from paceline.launch.launcher_variables import detect_world
from paceline.planner.layout.mesh import Mesh, resolve_mesh
from paceline.planner.layout.pipeline_options import refuse_schedule
from paceline.run_folder.run_folder import RunFolder, find_run, newest_checkpoint, read_task

ENTRY = "paceline.trainer.entrypoints:evaluate"


def evaluate(
    run: str | None = None, *, split: str = "eval", best: bool = False, common: RunOptions | None = None
) -> CommandOutcome:
    """Return the exact metrics of a run's newest good checkpoint, of its best, or of the checkpoint that `run` names.

    Without `common.layout`, the layout is the run's layout. It is `single` or `ddp` instead if the number of ranks
    differs, if the run's layout is `threads` or `auto`, or if the run's update rule is not `sync`. The ranks' logs are
    written outside the run folder, which does not change until the metrics are computed.
    """
    common = common or RunOptions()
    if split not in ("eval", "test"):
        raise UsageError(f"{split!r} is not a split.", hint="--split eval | test")
    folder, checkpoint = find_run(run, only_trained=True)
    task = replace(read_task(folder), job_handle=common.job_handle)
    if common.job_handle is None:
        parse_jobref(task.job)
    if best:
        checkpoint = resolve_mark(folder.checkpoints, BEST)
        if checkpoint is None:
            raise UsageError(f"{folder.path} has no best checkpoint.", hint=f"paceline ckpt ls {folder.path}")
    evaluation_task = replace(build_evaluation_task(task, common), update="sync", compress="none", faults="")
    joined = detect_world(os.environ)
    if not common.quiet and (joined is None or joined.rank == 0):
        print_line(
            f"evaluating {checkpoint or folder.path} on {split}_data with {plural(evaluation_task.ranks, 'process')}"
        )
        is_object = common.job_handle is not None
        print_line("the job: the object that was passed" if is_object else f"the job (its code runs): {task.job}")
    if joined is None:
        checkpoint = checkpoint or newest_checkpoint(folder)
    options = {"split": split, "checkpoint": str(checkpoint or "")}  # if empty, the ranks find the newest one
    task = replace(evaluation_task, verb="evaluate", options=options, resume=None, run=str(folder.path))
    with scratch_folder("evaluate") as scratch:
        answer = RunFolder(scratch.path).answer("evaluate")
        task = replace(task, options={**options, "answer": str(answer)})
        outcome = execute(task, entry=ENTRY, common=replace(common, quiet=True), logs=scratch.path)
        if outcome.exit_code:
            if outcome.failure is not None:
                scratch.keep()  # the failure message names these logs
            return outcome
        value = read_json(answer) if answer.exists() else None
    if value is not None:
        with suppress(OSError):  # the disk may be read-only
            write_json(folder.answer("evaluate"), value)
    return replace(outcome, value=value)


def build_evaluation_task(task: Task, common: RunOptions) -> Task:
    """Return the task for the requested layout and ranks, without the settings that this layout does not support.

    Raises:
        LayoutError, Problems: the layout is unknown, or it does not fit these ranks.
    """
    if common.layout is None:
        ranks = common.ranks or task.ranks
        run_layout = parse_layout(task.layout) if task.update == "sync" and task.layout != AUTO else None
        keeps_layout = run_layout is not None and run_layout.kind is not LayoutKind.THREADS and ranks == task.ranks
        layout_text = task.layout if keeps_layout else "single" if ranks == 1 else "ddp"
    else:
        layout_text = str(parse_layout(common.layout))
        ranks = common.ranks or parse_layout(layout_text).ranks or task.ranks
    layout, problems = parse_layout(layout_text), list[PacelineError]()
    mesh = resolve_mesh(layout, ranks=ranks, problems=problems, update=UpdateRule())
    problems += refuse_schedule(layout, mesh)
    raise_all(problems)
    unused_settings = _unused_exact_settings(task, mesh, keeps_layout=layout_text == task.layout)
    unused_settings |= {"train.compile"} if mesh.tp > 1 else set()
    unused_settings |= {"train.buffers"} if mesh.ranks > mesh.replicas else set()
    settings = {
        name: value
        for name, value in task.settings.items()
        if name not in unused_settings and not (name.startswith("place.") and layout_text != task.layout)
    }
    return replace(task, layout=layout_text, ranks=ranks, settings=settings)


def _unused_exact_settings(task: Task, mesh: Mesh, *, keeps_layout: bool) -> set[str]:
    """Return the settings of exact mode that this layout does not support.

    In another layout, the model is not split into tensor shards, because that layout does not use the `place` settings,
    which may contain the plan of the split.
    """
    shards = {name: int(task.settings.get(f"train.{name}", 0)) for name in ("tensor_shards", "sequence_shards")}
    has_tensor_shards = keeps_layout and shards["tensor_shards"] > 0
    has_sequence_shards = shards["sequence_shards"] > 0 and shards["sequence_shards"] % mesh.cp == 0
    if mesh.ep > 1 or (mesh.tp > 1 and not has_tensor_shards) or (mesh.cp > 1 and not has_sequence_shards):
        return {"train.exact", "train.tensor_shards", "train.sequence_shards"}
    return set() if has_tensor_shards else {"train.tensor_shards"}


def run_verb(options: EvaluateOptions, _: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    common = RunOptions(ranks=options.ranks, layout=options.layout, quiet=options.json)
    outcome = failure_result(evaluate(options.run, split=options.split, best=options.best, common=common))
    if not outcome.prints_result:
        return outcome.exit_code, None, ""
    if outcome.exit_code:
        return outcome.exit_code, outcome.summary(), outcome.screen
    value = outcome.value
    lines = [f"{name} {format_metric(number, decimals=6)}" for name, number in value["metrics"].items()]
    weights_note = ", averaged weights (ema)" if value["average"] else ""
    lines.append(
        f"{plural(value['samples'], 'sample')} of {value['split']}_data, each once; step {value['step']}{weights_note}"
    )
    return 0, value, "\n".join(lines)
