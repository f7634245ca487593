"""What each rank runs: a first step as it is, the second and the third under the allocator's account."""

import gc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from benchmarks.memory.allocator import count_all_threads, watch
from benchmarks.memory.resident import forget_most, resident_most, resident_now

from paceline.measure.held import held_now
from paceline.spec.task import Task
from paceline.store.disk import write_json
from paceline.store.runs import RunFolder
from paceline.train.run import Run
from paceline.train.session import Session


def measure(payload: Mapping[str, Any]) -> int:
    """Rank 0 writes what every rank found. What the interpreter left to be collected is collected first."""
    count_all_threads()
    asked = Run.worker(Task.from_json(payload))  # brings the job, and the libraries that it imports
    base = resident_now()
    session = asked.open()
    batches = session.loop.batches()
    session.loop.step(next(batches))
    gc.collect()
    found = session.world.gather_json({**_watched(session, batches), "rss_base": base})
    if session.world.is_main:
        answer = {"ranks": found, "micro_batch_size": session.ready.plan.micro_batch_size}
        write_json(session.run.path / "answer-compare.json", answer)
    session.world.barrier()
    session.close()
    return 0


def _watched(session: Session, batches: Any) -> dict[str, Any]:
    built, run = session.built, RunFolder(Path(session.ready.task.run))
    folder = run.path / f"rank-{session.world.rank}"
    folder.mkdir(exist_ok=True)
    with watch(folder=folder) as watching:
        begun, before = forget_most(), resident_now()
        for number in (2, 3):
            with watching.step(number):
                session.loop.step(next(batches))
        most = resident_most()
    account = watching.account
    held = held_now(
        model=built.model, optimizers=built.update.optimizers, shares=[each.parameter for each in built.named]
    )
    return {
        "rank": session.world.rank,
        "parameters": held.parameters,
        "gradients": held.gradients,
        "optimizer": held.optimizer,
        "buffers": held.buffers,
        "live_before": account.live_before,
        "live_after": account.live_after,
        "peak_live": account.peak,
        "peaks": list(account.peaks),
        "phase": account.phase,
        "inside": list(account.inside),
        "unseen": account.unseen_bytes,
        "num_events": account.num_events,
        "rss_before": before,
        "rss_peak": most if begun else None,
        "threads": torch.get_num_threads(),
    }
