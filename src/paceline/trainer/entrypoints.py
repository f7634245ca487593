"""Entry points that each rank runs for `train` and `evaluate`."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from paceline.checkpoint.files.checkpoint_folder import open_checkpoint
from paceline.config.task import Task
from paceline.data.order.cursor import Cursor
from paceline.errors import JobError
from paceline.filesystem.atomic_files import write_json
from paceline.run_folder.run_folder import RunFolder, newest_checkpoint
from paceline.trainer.parameter_server_worker import WorkerFinished
from paceline.trainer.run import Run
from paceline.trainer.saving.resume_run import restore_weights


def train(payload: Mapping[str, Any]) -> int:
    """Train to the end, to an early stop, or to a signal, and return the exit code."""
    task = Task.from_json(payload)
    try:
        with Run.worker(task) as run:
            if payload.get("options", {}).get("evaluate_first") and run.job.eval_data is not None:
                run.evaluate()
            for batch in run.batches():
                run.step(batch)
    except WorkerFinished as finished:
        return finished.exit_code
    return run.exit_code


def evaluate(payload: Mapping[str, Any]) -> int:
    """Compute exact metrics of a checkpoint. Rank 0 writes them to the file that the command reads."""
    task = Task.from_json(payload)
    run = Run.worker(task)
    split = str(task.options.get("split", "eval"))
    if getattr(run.job, f"{split}_data", None) is None:
        raise JobError(f"the job has no {split}_data.", hint=f"pl.Job(..., {split}_data=...)")
    _replace_optimizer(run)
    session = run.open()
    task = session.prepared_job.task
    run_folder = RunFolder(Path(task.run))
    requested_checkpoint = task.options.get("checkpoint")
    path = (
        Path(requested_checkpoint)
        if requested_checkpoint
        else newest_checkpoint(run_folder, reports_damaged=session.world.is_main)
    )
    loaded = open_checkpoint(path)
    restore_weights(loaded, setup=session.setup)
    session.loop.cursor = Cursor(step=loaded.step)
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
        write_json(Path(task.options["answer"]), answer)
    session.close()
    return 0


def _replace_optimizer(run: Run) -> None:
    """Replace the job's optimizer by a placeholder without a schedule, so that it does not restrict the layouts."""
    assert run._prepared_job is not None
    run.job = replace(run.job, optimizer=_placeholder_optimizer, lr_schedule=None)
    run._prepared_job = replace(run._prepared_job, job=run.job)


def _placeholder_optimizer(named_parameters: list[tuple[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.0)
