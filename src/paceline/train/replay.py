"""A run's own step, placed as it would be, on memory without numbers and ranks that are not there: what it holds."""

import gc
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch

from paceline.feed.types import StepInput
from paceline.job import Job
from paceline.measure.held import Held, Made, Watch, elements, held_now
from paceline.measure.hollow import Hollow
from paceline.measure.journal import Journal
from paceline.measure.moments import gloo_copies, moment_bytes
from paceline.nested import leaves
from paceline.place.meeting import PeerLeft
from paceline.plan.in_flight import most_held
from paceline.plan.pipeline import is_file
from paceline.plan.settle import Plan
from paceline.schedule.table import schedule_named
from paceline.spec.settings import Settings
from paceline.spec.update import Kind
from paceline.step.piped import PipelinePasses
from paceline.streams import preserved
from paceline.survive.short import trim
from paceline.torch_modes import nobody_there
from paceline.train.built import Built, build
from paceline.train.feeds import cut_for, read_first
from paceline.train.imagined import Scene
from paceline.train.loop import kept_batches

_MOST_MICRO = 2  # beside the stages of a pipeline: from the second one on all are alike


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Of one stage: what lies between steps, the most at once and what that was."""

    between: Held
    peak: Held


def replay(
    job: Job, settings: Settings, plan: Plan, *, journals: Sequence[Journal] = (), warm: bool = True
) -> list[Replayed]:
    """Two steps of every stage, the second one under watch; a journal for each, or none.

    Without `warm`, for one stage, it is the first one, which makes gradients and state.

    Raises:
        PacelineError: what the run itself would refuse.
    """
    scene = Scene(mesh=plan.mesh)
    alone = plan.mesh.ranks == 1
    with nullcontext() if alone else nobody_there(plan.mesh.ranks), preserved():
        if plan.mesh.pp == 1:
            with scene.baton:
                return [_stage(job, settings, plan, scene, 0, *journals, warm=warm)]
        return _together(job, settings, plan, scene, journals)


def _together(job: Job, settings: Settings, plan: Plan, scene: Scene, journals: Sequence[Journal]) -> list[Replayed]:
    found: dict[int, Replayed | BaseException] = {}

    def run(stage: int) -> None:
        try:
            with scene.baton:
                found[stage] = _stage(job, settings, plan, scene, stage, *journals[stage : stage + 1])
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


def _stage(
    job: Job, settings: Settings, whole: Plan, scene: Scene, stage: int, journal: Journal | None = None, *,
    warm: bool = True,
) -> Replayed:  # fmt: skip
    plan = shortened(whole)
    world = scene.world(stage, backend=plan.backend)
    made = Made()
    hollow = Hollow(emptied=scene.emptied, see=made.see, copies=gloo_copies if plan.backend == "gloo" else None)
    with hollow:
        hollow.holds = False
        built = build(job=job, settings=settings, plan=plan, world=world)
        hollow.holds = True
        shares = [member.parameter for member in built.named]
        optimizers = built.update.optimizers
        given = _batches(built, plan, 2 if plan.rule.has_servers else kept_batches(built))
        first = _first(plan)
        if warm:
            built.step.run(given[-2] if first is None else _batches(built, first, 1)[0])
        left_out = _left_out_bytes(given, whole, plan)
        gc.collect()  # what is in cycles goes sooner or later, and is no part of the step
        watch = Watch(
            model=built.model,
            optimizers=optimizers,
            shares=shares,
            others=made.storages(),
            moment=partial(moment_bytes, threads=plan.threads),
            beside=lambda: hollow.copied_bytes + left_out,
            note=None if journal is None else journal.note,
            turn=None if journal is None else journal.turn,
        )
        with watch, _in_parts(built, journal):
            built.step.run(given[-1])
        between = held_now(model=built.model, optimizers=optimizers, shares=shares)
        built.close()
    trim()
    return Replayed(between=between, peak=watch.peak)


def _batches(built: Built, plan: Plan, count: int) -> list[StepInput]:
    cut = cut_for(plan, built.settings, built.worlds.data)
    return read_first(built.data, built.settings, cut=cut, count=count)


def _in_parts(built: Built, journal: Journal | None) -> AbstractContextManager[None]:
    """Where stages go on from one microbatch to another, the journal's next part begins."""
    passes = built.step.passes
    if journal is None or not isinstance(passes, PipelinePasses):
        return nullcontext()
    return passes.watched(lambda *_: journal.turn())


def _first(plan: Plan) -> Plan | None:
    """A step that leaves what later ones find, gradients to be added to and the optimizer's state.

    None where it is as long as the others: gloo keeps what was sent in it, and other rules end in the middle of one.
    """
    return None if plan.backend == "gloo" or plan.rule.kind is not Kind.SYNC else _of_rounds(plan, 1)


def _left_out_bytes(given: Sequence[StepInput], whole: Plan, short: Plan) -> int:
    """The data of microbatches that were left out: on a CPU of all batches that are kept, on a device of one."""
    there, every = (-(-one.num_micro // one.replicas) for one in (short, whole))
    each = elements([t for t in leaves([one.data for one in given[-1].micro[-1:]]) if t.layout is torch.strided])
    batches = len(given)
    return each * max(0, batches * (every - there) if whole.device == "cpu" else every - batches * there)


def shortened(plan: Plan) -> Plan:
    """The same with fewer microbatches, where more of them hold nothing more."""
    rounds = -(-plan.num_micro // plan.replicas)
    return _of_rounds(plan, min(_MOST_MICRO, rounds) if plan.mesh.pp == 1 else _filled(plan, rounds))


def _of_rounds(plan: Plan, rounds: int) -> Plan:
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

    fewest, by = (ranks + 2, 1) if rule.name == "1f1b" else (2 * ranks, ranks)
    return next((micro for micro in range(fewest, rounds, by) if held(micro) == held(rounds)), rounds)
