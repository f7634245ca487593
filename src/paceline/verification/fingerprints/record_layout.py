"""One rank of a recorded layout: train a few steps, and write fingerprints of the whole gradients and weights.

Whole tensors are gathered one after another, so no rank ever has the whole model. The recording has the form of
`pl.record`, and only rank 0 writes it.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.config.task import Task
from paceline.filesystem.atomic_files import write_json
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.prepare import join_world, prepare
from paceline.verification.compare_independent_runs import read_first_batches
from paceline.verification.fingerprints.fingerprint import FLOAT32_EPS, FOLDER
from paceline.verification.fingerprints.record import fingerprint_tensor
from paceline.verification.precision import build_in_precision

_EPS = {"bf16": torch.finfo(torch.bfloat16).eps, "fp16": torch.finfo(torch.float16).eps}  # of gradients


def record_layout(payload: Mapping[str, Any]) -> int:
    """Train `steps` steps in the layout of the task, and record them into its run folder. Return the exit status."""
    task = Task.from_json(payload)
    prepared_job = prepare(task)
    world = join_world(prepared_job)
    setup = build_in_precision(prepared_job, world, None)
    eps = _EPS.get(prepared_job.settings.train.precision, FLOAT32_EPS)
    folder = RunFolder(Path(prepared_job.task.run))
    lines = list(_recorded_steps(setup, int(task.options["steps"]), eps=eps))
    if world.is_main:
        path = folder.path / FOLDER / "rank-0.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        answer = {"steps": len(lines) - 1, "micro_batch_size": prepared_job.plan.micro_batch_size}
        write_json(folder.answer("record"), answer)
    setup.close()
    world.close()
    return 0


def _recorded_steps(setup: TrainingSetup, steps: int, *, eps: float) -> Iterator[dict[str, Any]]:
    """Yield the line of the weights before the first step, and that of each step."""
    yield {"step": 0, "gradients": {}, "weights": _weights(setup)}
    for number, step_input in enumerate(read_first_batches(setup, steps, {}), 1):
        setup.model.train()
        result = setup.step.compute_gradients(step_input)
        scaler = setup.update.scaler
        scale = 1.0 if scaler is None else scaler.get_scale()
        gradients = {
            member.name: member.parameter.grad.detach() / scale
            for member in setup.named_parameters
            if member.parameter.grad is not None
        }
        names = sorted({name for of_rank in setup.world.gather_json(sorted(gradients)) for name in of_rank})
        recorded = _fingerprints(names, gradients, sharded=setup.optim_shards, world=setup.world, eps=eps)
        setup.update.commit(step=number, loss=result.loss, counts=result.totals.counts)
        setup.step.steps_done = number
        yield {"step": number, "gradients": recorded, "weights": _weights(setup)}


def _weights(setup: TrainingSetup) -> dict[str, Any]:
    local = {
        name: each.tensor.detach()
        for name, each in setup.weights.local_tensors.items()
        if each.tensor is not None and not each.is_buffer
    }
    names = [name for name in setup.weights.names if name in setup.weights.parameter_names]
    return _fingerprints(names, local, sharded=setup.weights, world=setup.world, eps=FLOAT32_EPS)


def _fingerprints(
    names: list[str], local: Mapping[str, Tensor], *, sharded: ShardedTensors, world: World, eps: float
) -> dict[str, Any]:
    """Return the fingerprints of whole tensors, on rank 0 alone."""
    found: dict[str, Any] = {}
    for name in names:
        whole = sharded.gather_full_tensor(name, local.get(name))
        if world.is_main:
            found[name] = fingerprint_tensor(whole, eps=eps).as_json()
    return found
