"""The third rung: both run freely for some steps, and what comes out is compared."""

from collections.abc import Mapping

from torch import Tensor

from paceline.feed.feed import make_feed
from paceline.feed.types import Cut
from paceline.order.cursor import Cursor
from paceline.prove.lockstep import BITWISE, DIFFERENT, ROUNDING, Finding
from paceline.prove.noise import MARGIN, distance, nudge
from paceline.prove.reference import Reference
from paceline.train.built import Built, build
from paceline.train.session import Ready
from paceline.world import World

_FLOOR = 1e-2


def run_free(ready: Ready, world: World, *, reference: Reference | None, steps: int) -> Finding:
    """Compare the weights after `steps` steps, with the drift of a disturbed one-process run as the floor."""
    built = build(job=ready.job, settings=ready.settings, plan=ready.plan, world=world)
    losses = _layout(built, steps)
    finding = Finding()
    if reference is not None:
        right, right_losses = _alone(reference, steps, disturbed=False)
        other, _ = _alone(_again(reference), steps, disturbed=True)
        start = _again(reference)
        _judge(finding, built, right, other, dict(start.model.named_parameters()))
        finding.detail = f"Loss {losses[-1]:.6g} beside {right_losses[-1]:.6g} after {len(losses)} steps."
    built.close()
    return Finding(**world.share_json(dict(vars(finding))))


def _layout(built: Built, steps: int) -> list[float]:
    plan, settings = built.plan, built.settings
    feed = make_feed(
        data=built.job.train_data,
        collate=built.job.collate,
        order=built.job.order,
        seed=settings.seed,
        cut=Cut(
            global_batch_size=plan.global_batch_size,
            micro_batch_size=plan.micro_batch_size,
            replica=built.world.rank,
            replicas=built.world.world_size,
            drop_last=settings.data.drop_last,
        ),
        cursor=Cursor(),
        workers=settings.data.workers,
        sample_seeds=settings.data.sample_seeds,
    )
    losses = []
    for given in feed:
        losses.append(built.step.run(given).loss)
        if len(losses) == steps:
            break
    feed.close()
    return losses


def _alone(reference: Reference, steps: int, *, disturbed: bool) -> tuple[dict[str, Tensor], list[float]]:
    if disturbed:
        nudge(reference, seed=1)
    epoch = position = 0
    losses = []
    for step in range(steps):
        gradient = reference.gradient(step=step, epoch=epoch, position=position)
        reference.update(gradient.total(reverse=disturbed))
        losses.append(gradient.loss)
        position += reference.spec.global_batch_size
        if reference.num_samples is not None and position >= reference.num_samples:
            epoch, position = epoch + 1, 0
    return {name: p.detach() for name, p in reference.model.named_parameters()}, losses


def _again(reference: Reference) -> Reference:
    return Reference(job=reference.job, spec=reference.spec, cast=reference.cast)


def _judge(
    finding: Finding,
    built: Built,
    right: Mapping[str, Tensor],
    disturbed: Mapping[str, Tensor],
    start: Mapping[str, Tensor],
) -> None:
    """Drift is measured against how far training has moved the weights at all."""
    for member in built.named:
        target = right[member.name]
        apart = distance(member.parameter, target)
        moved = distance(target, start[member.name])
        floor = max(MARGIN * distance(disturbed[member.name], target), _FLOOR * moved)
        verdict = BITWISE if apart == 0.0 else ROUNDING if apart <= floor else DIFFERENT
        finding.note(verdict, difference=apart, floor=floor)
        if verdict == DIFFERENT:
            cause = "the runs part over several steps though each step alone agrees: optimizer state or schedule"
            finding.blame(step=0, parameter=member.name, cause=cause)
