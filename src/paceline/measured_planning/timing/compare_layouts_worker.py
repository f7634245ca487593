"""One rank of `compare JOB --layouts`: time a few steps, then measure schedule, memory and communication in others."""

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


def time_layout(payload: Mapping[str, Any]) -> int:
    """Run timed steps, then steps that are recorded. Rank 0 writes the memory and communication of every rank."""
    task = Task.from_json(payload)
    session = Run.worker(task).open()
    num_timed = int(task.options["steps"])
    batches = session.loop.batches()
    for _ in range(num_timed):
        session.loop.step(next(batches))
    schedule = measure_schedule(session, batches)
    observations = session.world.gather_json(_observe_step(session, next(batches)))
    if session.world.is_main:
        plan = session.prepared_job.plan
        answer = {
            "ranks": observations,
            "micro_batch_size": plan.micro_batch_size,
            "schedule": None if schedule is None else asdict(schedule),
        }
        write_json(RunFolder(Path(session.prepared_job.task.run)).answer("compare"), answer)
    session.world.barrier()
    session.close()
    return 0


def _observe_step(session: Session, batch: Any) -> dict[str, Any]:
    """Return this rank's peak memory and sent bytes in one step. With thread replicas, measure between steps."""
    setup = session.setup
    with ExitStack() as stack:
        communication = stack.enter_context(CommunicationCounter())
        tracker = stack.enter_context(_memory_tracker(setup)) if len(setup.models) == 1 else None
        session.loop.step(batch)
    other_replicas = [memory_at_rest(model=model, optimizers=[]) for model in setup.models[1:]]
    first_replica = memory_at_rest(
        model=setup.model, optimizers=setup.update.optimizers, updated_tensors=_updated_tensors(setup)
    )
    peak = tracker.peak if tracker is not None else _sum([first_replica, *other_replicas])
    return {
        "peak_bytes": peak.as_json(),
        "is_peak_measured": tracker is not None,
        "sent_bytes": {name: totals["sent_bytes"] for name, totals in communication.as_json().items()},
    }


def _memory_tracker(setup: TrainingSetup) -> MemoryTracker:
    device = setup.world.device.type
    return MemoryTracker(
        model=setup.model, optimizers=setup.update.optimizers, updated_tensors=_updated_tensors(setup), device=device
    )


def _updated_tensors(setup: TrainingSetup) -> list[Tensor]:
    """Return the tensors that the optimizers update: the model's parameters, or this rank's slices of them."""
    return [member.parameter for member in setup.named_parameters]


def _sum(parts: list[MemoryByKind]) -> MemoryByKind:
    names = ("parameters", "gradients", "optimizer", "buffers", "activations")
    return MemoryByKind(**{name: sum(getattr(part, name) for part in parts) for name in names})
