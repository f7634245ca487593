"""A run's own step, placed as it would be, on memory without numbers and ranks that are not there: what it holds."""

import gc
import threading
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from paceline.feed.feed import make_feed
from paceline.feed.types import Cut
from paceline.job import Job
from paceline.measure.held import Held, Made, Watch, held_now
from paceline.measure.hollow import Hollow
from paceline.measure.moments import gloo_copies, moment_bytes
from paceline.measure.sent import Sent
from paceline.order.cursor import Cursor
from paceline.place.meeting import PeerLeft
from paceline.plan.in_flight import most_held
from paceline.plan.pipeline import is_file
from paceline.plan.settle import Plan
from paceline.schedule.table import schedule_named
from paceline.spec.settings import Settings
from paceline.streams import preserved
from paceline.survive.short import trim
from paceline.torch_modes import nobody_there
from paceline.train.built import build
from paceline.train.imagined import Scene
from paceline.train.loop import kept_batches

_MOST_MICRO = 2  # beside the stages of a pipeline: from the second one on all are alike


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Of one stage: what lies between steps, the most at once and what that was, and what backward began with."""

    between: Held
    peak: Held
    kept_bytes: int
    sent: dict[str, Any]


def replay(job: Job, settings: Settings, plan: Plan) -> list[Replayed]:
    """Two steps of every stage, the second one under watch.

    Raises:
        PacelineError: what the run itself would refuse.
    """
    plan = shortened(plan)
    scene = Scene(mesh=plan.mesh)
    alone = plan.mesh.ranks == 1
    with nullcontext() if alone else nobody_there(plan.mesh.ranks), preserved():
        if plan.mesh.pp == 1:
            with scene.baton:
                return [_stage(job, settings, plan, scene, 0)]
        return _together(job, settings, plan, scene)


def _together(job: Job, settings: Settings, plan: Plan, scene: Scene) -> list[Replayed]:
    found: dict[int, Replayed | BaseException] = {}

    def run(stage: int) -> None:
        try:
            with scene.baton:
                found[stage] = _stage(job, settings, plan, scene, stage)
        except BaseException as error:
            found[stage] = error
            scene.leave()

    threads = [threading.Thread(target=run, args=(stage,), daemon=True) for stage in range(plan.mesh.pp)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    errors = [found[stage] for stage in sorted(found) if isinstance(found[stage], BaseException)]
    first = next((error for error in errors if not isinstance(error, PeerLeft)), None)
    if isinstance(first, BaseException):
        raise first
    return [one for stage in sorted(found) if isinstance(one := found[stage], Replayed)]


def _stage(job: Job, settings: Settings, plan: Plan, scene: Scene, stage: int) -> Replayed:
    world = scene.world(stage, backend=plan.backend)
    made = Made()
    hollow = Hollow(emptied=scene.emptied, see=made.see, copies=gloo_copies if plan.backend == "gloo" else None)
    with hollow:
        hollow.holds = False
        built = build(job=job, settings=settings, plan=plan, world=world)
        hollow.holds = True
        feed = make_feed(
            data=job.train_data,
            collate=job.collate,
            order=job.order,
            seed=settings.seed,
            cut=Cut(
                global_batch_size=plan.global_batch_size,
                micro_batch_size=plan.micro_batch_size,
                replicas=plan.replicas,
            ),
            cursor=Cursor(),
        )
        shares = [member.parameter for member in built.named]
        optimizers = built.update.optimizers
        given = list(islice(feed, 2 if plan.rule.has_servers else kept_batches(built)))
        built.step.run(given[-2])
        gc.collect()  # what is in cycles goes sooner or later, and is no part of the step
        with (
            Sent() as sent,
            Watch(
                model=built.model,
                optimizers=optimizers,
                shares=shares,
                others=made.storages(),
                moment=partial(moment_bytes, threads=plan.threads),
                beside=lambda: hollow.copied_bytes,
            ) as watch,
        ):
            built.step.run(given[-1])
        between = held_now(model=built.model, optimizers=optimizers, shares=shares)
        built.close()
    trim()
    return Replayed(between=between, peak=watch.peak, kept_bytes=watch.kept_bytes, sent=sent.as_json())


def shortened(plan: Plan) -> Plan:
    """The same with fewer microbatches, where more of them hold nothing more."""
    rounds = -(-plan.num_micro // plan.replicas)
    rounds = min(_MOST_MICRO, rounds) if plan.mesh.pp == 1 else _filled(plan, rounds)
    num_micro = rounds * plan.replicas
    return replace(plan, num_micro=num_micro, global_batch_size=num_micro * plan.micro_batch_size)


def _filled(plan: Plan, rounds: int) -> int:
    """As many as fill the pipeline: from there on every rank holds as much at its fullest."""
    if is_file(plan.asked.schedule) or plan.backend == "gloo":  # which keeps what it sent to the end of the step
        return rounds
    rule, ranks = schedule_named(plan.asked.schedule), plan.mesh.pp
    virtual = plan.asked.virtual or rule.virtual

    def held(micro: int) -> list[int]:
        places = range(ranks)
        return [most_held(rule.name, ranks=ranks, micro=micro, virtual=virtual, rank=place) for place in places]

    return next((micro for micro in range(2 * ranks, rounds, ranks) if held(micro) == held(rounds)), rounds)
