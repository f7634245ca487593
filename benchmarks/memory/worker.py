"""What each rank runs: a first step as it is, two whose resident memory is asked for, two under the account.

The profiler needs some 20 to 40 MB itself, which the allocator does not count and the kernel does: hence not at once.
"""

import gc
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from benchmarks.memory.allocator import count_all_threads, watch
from benchmarks.memory.resident import forget_most, resident_most, resident_now

from paceline.config.task import Task
from paceline.filesystem.atomic_files import write_json
from paceline.profiling.model_tracing.memory_tracker import memory_at_rest
from paceline.trainer.run import Run
from paceline.trainer.session import Session


def measure(payload: Mapping[str, Any]) -> int:
    """Rank 0 writes what every rank found. What the interpreter left to be collected is collected first."""
    count_all_threads()
    asked = Run.worker(Task.from_json(payload))  # brings the job, and the libraries that it imports
    base = resident_now()
    session = asked.open()
    batches = session.loop.batches()
    session.loop.step(next(batches))
    gc.collect()
    own = {"rank": session.world.rank, "threads": torch.get_num_threads(), "rss_base": base}
    own |= _resident(session, batches) | _accounted(session, batches) | _held(session)
    found = session.world.gather_json(own)
    if session.world.is_main:
        answer = {"ranks": found, "micro_batch_size": session.prepared_job.plan.micro_batch_size}
        write_json(session.run.path / "answer-compare.json", answer)
    session.world.barrier()
    session.close()
    return 0


def _resident(session: Session, batches: Iterator[Any]) -> dict[str, Any]:
    """Over the second and the third step; without the most where the kernel won't begin a new one."""
    begun, before = forget_most(), resident_now()
    for batch in islice(batches, 2):
        session.loop.step(batch)
    return {"rss_before": before, "rss_peak": resident_most() if begun else None}


def _accounted(session: Session, batches: Iterator[Any]) -> dict[str, Any]:
    """Over the next two; a batch is read inside its step, as it is in a run."""
    folder = session.run.path / f"rank-{session.world.rank}"
    folder.mkdir(exist_ok=True)
    with watch(folder=folder) as watching:
        for number in (4, 5):
            with watching.step(number):
                session.loop.step(next(batches))
    account = watching.account
    return {
        "live_before": account.live_before,
        "live_after": account.live_after,
        "peak_live": account.peak,
        "peaks": list(account.peaks),
        "phase": account.phase,
        "inside": list(account.inside),
        "unseen": account.unseen_bytes,
        "num_events": account.num_events,
    }


def _held(session: Session) -> dict[str, int]:
    built = session.setup
    shares = [each.parameter for each in built.named_parameters]
    held = memory_at_rest(model=built.model, optimizers=built.update.optimizers, updated_tensors=shares).as_json()
    return {name: held[name] for name in ("parameters", "gradients", "optimizer", "buffers")}
