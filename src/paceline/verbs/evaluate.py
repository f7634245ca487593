"""`evaluate`."""

import os
from dataclasses import replace
from pathlib import Path

from paceline.errors import UsageError
from paceline.launch.environments import detect
from paceline.spec.jobref import parse_jobref
from paceline.spec.task import Task
from paceline.spec.words import many
from paceline.store.checkpoints import BEST, marked
from paceline.store.disk import read_json
from paceline.store.runs import RunFolder, find_run
from paceline.talk import say
from paceline.verbs.running import Answer, Common, execute, read_answer

ENTRY = "paceline.train.worker:evaluate"


def evaluate(
    run: str | None = None, *, split: str = "eval", best: bool = False, common: Common | None = None
) -> Answer:
    """Exact metrics of a run's newest good checkpoint, of its best, or of the one named."""
    common = common or Common()
    if split not in ("eval", "test"):
        raise UsageError(f"{split!r} is no split.", hint="--split eval | test")
    folder, checkpoint = find_run(run, trains=True)
    task = replace(saved_task(folder.path), job_handle=common.job_handle)
    if common.job_handle is None:
        parse_jobref(task.job)
    if best:
        checkpoint = marked(folder.checkpoints, BEST)
        if checkpoint is None:
            raise UsageError(f"{folder.path} has no best checkpoint.", hint="paceline ckpt ls")
    options = {"split": split, "checkpoint": str(checkpoint or "")}
    ranks = common.ranks or task.ranks
    layout = "single" if ranks == 1 else "ddp"
    how = replace(task, layout=layout, update="sync", compress="none", ranks=ranks, faults="")
    task = replace(how, verb="evaluate", options=options, resume=None, run=str(folder.path))
    joined = detect(os.environ)
    if not common.quiet and (joined is None or joined.rank == 0):
        say(f"evaluating {checkpoint or folder.path} on {split}_data with {many(ranks, 'process')}")
    answer = execute(task, entry=ENTRY, common=replace(common, quiet=True))
    return replace(answer, value=read_answer(task, "evaluate"))


def saved_task(folder: Path) -> Task:
    """The task that a run was started with.

    Raises:
        UsageError: the run never got that far.
    """
    path = RunFolder(folder).task
    if not path.exists():
        raise UsageError(
            f"{folder} does not say what it ran.",
            cause="it ended before its first step, or is of a plan or a verify",
            hint="ls runs/*/, and the same with another run",
        )
    return Task.from_json(read_json(path))
