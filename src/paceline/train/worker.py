"""What each rank runs for `train` and `evaluate`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError, JobError
from paceline.spec.task import Task
from paceline.store.checkpoints import load, newest_good
from paceline.store.disk import write_json
from paceline.store.runs import RunFolder
from paceline.train.leased import Home
from paceline.train.run import Run
from paceline.train.saving import restore_weights


def train(payload: Mapping[str, Any]) -> int:
    """Train to the end, to an early stop, or to a signal."""
    task = Task.from_json(payload)
    try:
        with Run.worker(task) as run:
            if payload.get("options", {}).get("evaluate_first") and run.job.eval_data is not None:
                run.evaluate()
            for batch in run.batches():
                run.step(batch)
    except Home as home:
        return home.exit_code
    return run.exit_code


def evaluate(payload: Mapping[str, Any]) -> int:
    """Exact metrics of a checkpoint; rank 0 writes the answer."""
    task = Task.from_json(payload)
    asked = Run.worker(task)
    split = str(task.options.get("split", "eval"))
    if getattr(asked.job, f"{split}_data", None) is None:
        raise JobError(f"the job has no {split}_data.", hint=f"pl.Job(..., {split}_data=...)")
    session = asked.open()
    task = session.ready.task
    run = RunFolder(Path(task.run))
    path = Path(task.options["checkpoint"]) if task.options.get("checkpoint") else newest_good(run.checkpoints)[0]
    if path is None:
        raise CheckpointError("the run has no checkpoint to evaluate.", where=str(run.checkpoints))
    loaded = load(path)
    restore_weights(loaded, built=session.built)
    session.loop.cursor = type(session.loop.cursor)(step=loaded.step)
    event = session.loop.evaluate(split=split)
    if session.world.is_main:
        answer = {
            "split": split,
            "step": loaded.step,
            "checkpoint": str(path),
            "metrics": event.metrics,
            "samples": event.samples,
            "average": event.average,
        }
        write_json(run.path / "answer-evaluate.json", answer)
    session.close()
    return 0
