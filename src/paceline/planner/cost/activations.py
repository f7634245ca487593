"""Activation memory of one rank at the moments of a step that may be its peak, from the cost of each part."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planner.cost.layer_cost import LayerCost
from paceline.planner.model_costs.layer_chain import Counts


@dataclass(frozen=True, kw_only=True)
class ActivationPeak:
    """Activation bytes of one rank at the candidate peaks of a step.

    The rank holds `held` of its step's `total` stage activations at once: together `held_bytes`, and `cast_bytes` of
    weight copies. `tail_bytes` and `tail_cast_bytes` are the share of one microbatch in the part after the blocks; they
    are freed before the blocks run backward.

    Transient bytes: `tail_moment_bytes` until that part's backward ends; then, for one block or the part before the
    blocks, `again_bytes` and `again_cast_bytes` of recomputation and `moment_bytes` of other temporaries. `end_bytes`
    is the total that remains in the first block's backward, when all gradients exist. `border_bytes` is the message to
    the next stage.
    """

    held: int
    total: int
    held_bytes: float
    cast_bytes: float
    tail_bytes: float
    tail_cast_bytes: float
    tail_moment_bytes: float
    again_bytes: float
    again_cast_bytes: float
    moment_bytes: float
    end_bytes: float
    border_bytes: float

    @property
    def narrow_bytes(self) -> float:
        """The bytes that are kept for backward, without weight copies."""
        return self.held_bytes

    @property
    def is_before_gradients(self) -> bool:
        """True if every microbatch runs forward before the first backward: at the peak, no gradients exist."""
        return self.held >= self.total


def alive_of(works: Sequence[LayerCost], stages: Sequence[Counts], *, held: int, total: int) -> ActivationPeak:
    """Return the activation peak of a rank with these stages, which share `held`; the fullest get the remainder."""
    border = max((work.border_bytes for work in works[2:]), default=0.0)
    given = [
        0.0 if s[0] else border for s in stages
    ]  # the message from the previous stage is kept as the first block's input
    kept, cast = [work.kept_bytes for work in works], [work.cast_bytes for work in works]
    totals = [_sum(s, kept) + own for s, own in zip(stages, given, strict=True)]
    casts = [_sum(s, cast) for s in stages]
    blocks = [work for place, work in enumerate(works) if place > 1 and any(s[place] for s in stages)]
    body = [*blocks, *([works[0]] if any(s[0] for s in stages) else [])] or [works[1]]
    tail = works[1] if any(s[1] for s in stages) else None
    before = works[0].kept_bytes if any(s[0] for s in stages) else 0.0
    rest = _dealt(totals, max(0, held - len(stages)))
    return ActivationPeak(
        held=held,
        total=total,
        held_bytes=_dealt(totals, held),
        cast_bytes=_dealt(casts, held),
        tail_bytes=tail.kept_bytes if tail else 0.0,
        tail_cast_bytes=tail.cast_bytes if tail else 0.0,
        tail_moment_bytes=tail.again_bytes + tail.moment_bytes if tail else 0.0,
        again_bytes=max(work.again_bytes for work in body),
        again_cast_bytes=max(work.again_cast_bytes for work in body),
        moment_bytes=max(work.moment_bytes for work in body),
        end_bytes=rest + before + max(map(_alone_bytes, blocks or body)),
        border_bytes=max(work.border_bytes for work in [*body, *([tail] if tail else [])]),
    )


def _alone_bytes(work: LayerCost) -> float:
    return work.kept_bytes + work.cast_bytes + work.again_bytes + work.again_cast_bytes + work.moment_bytes


def _sum(stage: Counts, each: Sequence[float]) -> float:
    return sum(count * one for count, one in zip(stage, each, strict=True) if count)


def _dealt(totals: Sequence[float], held: int) -> float:
    rounds, rest = divmod(held, len(totals))
    return rounds * sum(totals) + sum(sorted(totals, reverse=True)[:rest])
