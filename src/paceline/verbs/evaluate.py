"""`evaluate`."""

import os
from contextlib import suppress
from dataclasses import replace

from paceline.errors import PacelineError, UsageError, raise_all
from paceline.launch.environments import detect
from paceline.plan.legal import refuse_products
from paceline.plan.mesh import mesh_of
from paceline.spec.auto import AUTO
from paceline.spec.jobref import parse_jobref
from paceline.spec.layout import Kind, parse_layout
from paceline.spec.task import Task
from paceline.spec.update import Update
from paceline.spec.words import many
from paceline.store.checkpoints import BEST, marked
from paceline.store.disk import read_json, write_json
from paceline.store.runs import find_run, read_task
from paceline.store.scratch import scratch_folder
from paceline.talk import say
from paceline.verbs.running import Answer, Common, execute

ENTRY = "paceline.train.worker:evaluate"
ANSWER = "answer-evaluate.json"


def evaluate(
    run: str | None = None, *, split: str = "eval", best: bool = False, common: Common | None = None
) -> Answer:
    """Return the exact metrics of a run's newest good checkpoint, of its best, or of the one named.

    Without a layout it is the run's own, where the ranks are as many: what was trained so can be evaluated so. The
    ranks' logs lie outside of the run, which nothing changes until the metrics are there.
    """
    common = common or Common()
    if split not in ("eval", "test"):
        raise UsageError(f"{split!r} is no split.", hint="--split eval | test")
    folder, checkpoint = find_run(run, trains=True)
    task = replace(read_task(folder), job_handle=common.job_handle)
    if common.job_handle is None:
        parse_jobref(task.job)
    if best:
        checkpoint = marked(folder.checkpoints, BEST)
        if checkpoint is None:
            raise UsageError(f"{folder.path} has no best checkpoint.", hint="paceline ckpt ls")
    options = {"split": split, "checkpoint": str(checkpoint or "")}
    how = replace(as_evaluated(task, common), update="sync", compress="none", faults="")
    task = replace(how, verb="evaluate", options=options, resume=None, run=str(folder.path))
    joined = detect(os.environ)
    if not common.quiet and (joined is None or joined.rank == 0):
        say(f"evaluating {checkpoint or folder.path} on {split}_data with {many(task.ranks, 'process')}")
        given = common.job_handle is not None
        say("the job: the one that was given" if given else f"the job, which this runs: {task.job}")
    with scratch_folder("evaluate") as aside:
        task = replace(task, options={**options, "answer": str(aside.path / ANSWER)})
        answer = execute(task, entry=ENTRY, common=replace(common, quiet=True), logs=aside.path)
        if answer.exit_code:
            if answer.failure is not None:
                aside.keep()  # what is said of the failure names its logs
            return answer
        value = read_json(aside.path / ANSWER) if (aside.path / ANSWER).exists() else None
    if value is not None:
        with suppress(OSError):  # the disk may only be read
            write_json(folder.path / ANSWER, value)
    return replace(answer, value=value)


def as_evaluated(task: Task, common: Common) -> Task:
    """Return the task in the layout and on the ranks that are asked for, without settings that are of training alone.

    Raises:
        LayoutError, Problems: no layout, or one that these ranks can't have.
    """
    if common.layout is None:
        ranks = common.ranks or task.ranks
        own = parse_layout(task.layout) if task.update == "sync" and task.layout != AUTO else None
        stays = own is not None and own.kind is not Kind.THREADS and ranks == task.ranks
        text = task.layout if stays else "single" if ranks == 1 else "ddp"
    else:
        text = str(parse_layout(common.layout))
        ranks = common.ranks or parse_layout(text).ranks or task.ranks
    layout, problems = parse_layout(text), list[PacelineError]()
    mesh = mesh_of(layout, ranks=ranks, problems=problems, update=Update())
    problems += refuse_products(layout, mesh)
    raise_all(problems)
    idle = {"train.exact"} if mesh.tp * mesh.cp * mesh.ep > 1 else set()
    idle |= {"train.compile"} if mesh.tp > 1 else set()
    idle |= {"train.buffers"} if mesh.ranks > mesh.replicas else set()
    settings = {
        name: value
        for name, value in task.settings.items()
        if name not in idle and not (name.startswith("place.") and text != task.layout)
    }
    return replace(task, layout=text, ranks=ranks, settings=settings)
