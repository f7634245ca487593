"""Estimate the activation memory of one rank at those points of a step where its memory may peak."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planner.cost.layer_cost import LayerCost
from paceline.planner.model_costs.layer_chain import Counts


@dataclass(frozen=True, kw_only=True)
class ActivationPeak:
    """Activation bytes of one rank at the points of a step that may be its peak.

    A step has one activation per microbatch and stage of the rank. The tail is the part after the blocks; its backward
    runs first. Transient bytes live within the backward of one part.
    """

    num_held: int
    """The number of activations that the rank holds at most at once."""
    num_total: int
    """The number of activations of a whole step."""
    held_bytes: float
    """The bytes of the held activations."""
    cast_bytes: float
    """The bytes of weight copies in another precision that are held with them."""
    tail_bytes: float
    """The tail's share of `held_bytes` for one microbatch, which is freed before the blocks run backward."""
    tail_cast_bytes: float
    """The tail's share of `cast_bytes` for one microbatch, which is freed at the same time."""
    tail_transient_bytes: float
    """The transient bytes of the tail's backward."""
    recompute_bytes: float
    """The transient bytes of recomputation: the largest of a block or of the part before the blocks."""
    recompute_cast_bytes: float
    """The transient bytes of weight copies in that recomputation."""
    transient_bytes: float
    """The other transient bytes: the largest of a block or of the part before the blocks."""
    end_bytes: float
    """The total bytes in the first block's backward, when all gradients exist."""
    border_bytes: float
    """The bytes of the message to the next stage."""

    @property
    def is_before_gradients(self) -> bool:
        """True if all forwards run before the first backward, so that no gradients exist at the peak."""
        return self.num_held >= self.num_total


def build_activation_peak(
    layer_costs: Sequence[LayerCost], stages: Sequence[Counts], *, num_held: int, num_total: int
) -> ActivationPeak:
    """Return the activation peak of a rank that runs `stages` and holds `num_held` stage activations at once.

    The stages hold equally many of them. If the number does not divide evenly, the largest stages hold one more.
    """
    # layer_costs[0] is the part before the blocks, layer_costs[1] is the part after them
    border_bytes = max((cost.border_bytes for cost in layer_costs[2:]), default=0.0)
    # the message from the previous stage is saved as the input of the first block
    input_bytes = [0.0 if s[0] else border_bytes for s in stages]
    kept_bytes, cast_bytes = [cost.kept_bytes for cost in layer_costs], [cost.cast_bytes for cost in layer_costs]
    stage_bytes = [
        _stage_bytes(s, kept_bytes) + stage_input_bytes
        for s, stage_input_bytes in zip(stages, input_bytes, strict=True)
    ]
    stage_cast_bytes = [_stage_bytes(s, cast_bytes) for s in stages]
    blocks = [cost for part, cost in enumerate(layer_costs) if part > 1 and any(s[part] for s in stages)]
    body = [*blocks, *([layer_costs[0]] if any(s[0] for s in stages) else [])] or [layer_costs[1]]
    tail_part = layer_costs[1] if any(s[1] for s in stages) else None
    first_part_bytes = layer_costs[0].kept_bytes if any(s[0] for s in stages) else 0.0
    remaining_bytes = _held_bytes(stage_bytes, max(0, num_held - len(stages)))
    return ActivationPeak(
        num_held=num_held,
        num_total=num_total,
        held_bytes=_held_bytes(stage_bytes, num_held),
        cast_bytes=_held_bytes(stage_cast_bytes, num_held),
        tail_bytes=tail_part.kept_bytes if tail_part else 0.0,
        tail_cast_bytes=tail_part.cast_bytes if tail_part else 0.0,
        tail_transient_bytes=tail_part.recompute_bytes + tail_part.transient_bytes if tail_part else 0.0,
        recompute_bytes=max(cost.recompute_bytes for cost in body),
        recompute_cast_bytes=max(cost.recompute_cast_bytes for cost in body),
        transient_bytes=max(cost.transient_bytes for cost in body),
        end_bytes=remaining_bytes + first_part_bytes + max(map(_backward_bytes, blocks or body)),
        border_bytes=max(cost.border_bytes for cost in [*body, *([tail_part] if tail_part else [])]),
    )


def _backward_bytes(cost: LayerCost) -> float:
    return cost.kept_bytes + cost.cast_bytes + cost.recompute_bytes + cost.recompute_cast_bytes + cost.transient_bytes


def _stage_bytes(stage: Counts, bytes_by_part: Sequence[float]) -> float:
    return sum(count * part_bytes for count, part_bytes in zip(stage, bytes_by_part, strict=True) if count)


def _held_bytes(stage_bytes: Sequence[float], num_held: int) -> float:
    rounds, remainder = divmod(num_held, len(stage_bytes))
    return rounds * sum(stage_bytes) + sum(sorted(stage_bytes, reverse=True)[:remainder])
