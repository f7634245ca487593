"""The worker of `compare JOB --layouts`: times a few steps, and measures memory and communication in one more."""

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.config.task import Task
from paceline.filesystem.atomic_files import write_json
from paceline.measured_planning.timing.schedule_benchmark import measure_schedule
from paceline.profiling.model_tracing.communication_counter import CommunicationCounter
from paceline.profiling.model_tracing.memory_tracker import MemoryByKind, MemoryTracker, memory_at_rest
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.run import Run
from paceline.trainer.session import Session
from paceline.trainer.setup.build_training_setup import TrainingSetup


def measure(payload: Mapping[str, Any]) -> int:
    """Run timed steps, then some that are recorded; rank 0 writes the memory and communication of every rank."""
    task = Task.from_json(payload)
    session = Run.worker(task).open()
    timed = int(task.options["steps"])
    batches = session.loop.batches()
    for _ in range(timed):
        session.loop.step(next(batches))
    schedule = measure_schedule(session, batches)
    found = session.world.gather_json(_looked_at(session, next(batches)))
    if session.world.is_main:
        plan = session.prepared_job.plan
        answer = {
            "ranks": found,
            "micro_batch_size": plan.micro_batch_size,
            "schedule": None if schedule is None else asdict(schedule),
        }
        write_json(RunFolder(Path(session.prepared_job.task.run)).answer("compare"), answer)
    session.world.barrier()
    session.close()
    return 0


def _looked_at(session: Session, batch: Any) -> dict[str, Any]:
    """Return this rank's memory and sent bytes in one step; for thread replicas, only the memory between steps."""
    built = session.setup
    with ExitStack() as stack:
        sent = stack.enter_context(CommunicationCounter())
        watch = stack.enter_context(_watch(built)) if len(built.models) == 1 else None
        session.loop.step(batch)
    lying = [memory_at_rest(model=model, optimizers=[]) for model in built.models[1:]]
    first = memory_at_rest(model=built.model, optimizers=built.update.optimizers, shares=_shares(built))
    peak = watch.peak if watch is not None else _sum([first, *lying])
    flows = {name: flow["sent_bytes"] for name, flow in sent.as_json().items()}
    return {
        "held": peak.as_json(),
        "between": _sum([first, *lying]).as_json(),
        "kept": None if watch is None else watch.kept_bytes,
        "sent": flows,
    }


def _watch(built: TrainingSetup) -> MemoryTracker:
    device = built.world.device.type
    return MemoryTracker(model=built.model, optimizers=built.update.optimizers, shares=_shares(built), device=device)


def _shares(built: TrainingSetup) -> list[Tensor]:
    """Return the tensors that the optimizers update: the model's parameters, or this rank's rows of them."""
    return [member.parameter for member in built.named]


def _sum(parts: list[MemoryByKind]) -> MemoryByKind:
    names = ("parameters", "gradients", "optimizer", "buffers", "activations")
    return MemoryByKind(**{name: sum(getattr(part, name) for part in parts) for name in names})
