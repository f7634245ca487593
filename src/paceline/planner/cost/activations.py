"""Estimate the activation memory of one rank at those points of a step that may be its peak."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planner.cost.layer_cost import LayerCost
from paceline.planner.model_costs.layer_chain import Counts


@dataclass(frozen=True, kw_only=True)
class ActivationPeak:
    """The activation bytes of one rank at those points of a step that may be its peak.

    Here, an activation is all that one stage saves for one microbatch. The tail is the part after the blocks; its
    backward runs first. Transient bytes are held only within the backward of one part.
    """

    num_held: int
    """The largest number of activations that the rank holds at once."""
    num_total: int
    """The number of activations of a whole step."""
    held_bytes: float
    """The bytes of `num_held` activations."""
    cast_bytes: float
    """The bytes of the weight copies in another precision that are held with these activations."""
    tail_bytes: float
    """The tail's share of `held_bytes` for one microbatch, which is freed before the backward of the blocks."""
    tail_cast_bytes: float
    """The tail's share of `cast_bytes` for one microbatch, which is freed at the same time as `tail_bytes`."""
    tail_transient_bytes: float
    """The transient bytes of the tail's backward."""
    recompute_bytes: float
    """The transient bytes of recomputation: the maximum over the blocks and the part before them."""
    recompute_cast_bytes: float
    """The transient bytes of weight copies in recomputation: the maximum over the same parts."""
    transient_bytes: float
    """The other transient bytes: the maximum over the same parts."""
    end_bytes: float
    """All activation bytes in the backward of the first block, when all gradients exist."""
    border_bytes: float
    """The bytes of the message to the next stage."""

    @property
    def is_before_gradients(self) -> bool:
        """True if all forwards run before the first backward, so that no gradients exist at the peak."""
        return self.num_held >= self.num_total


def build_activation_peak(
    layer_costs: Sequence[LayerCost], stages: Sequence[Counts], *, num_held: int, num_total: int
) -> ActivationPeak:
    """Return the activation peak of a rank that holds these stages.

    The `num_held` activations are divided evenly among the stages, and the remainder goes to the largest stages.
    """
    # costs 0 and 1 are those of the parts before and after the blocks
    border_bytes = max((cost.border_bytes for cost in layer_costs[2:]), default=0.0)
    # the message from the previous stage is saved as the input of the first block
    input_bytes = [0.0 if s[0] else border_bytes for s in stages]
    kept_bytes, cast_bytes = [cost.kept_bytes for cost in layer_costs], [cost.cast_bytes for cost in layer_costs]
    stage_bytes = [
        _stage_bytes(s, kept_bytes) + own_input_bytes for s, own_input_bytes in zip(stages, input_bytes, strict=True)
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
    """Return all bytes that the backward of one part needs."""
    return cost.kept_bytes + cost.cast_bytes + cost.recompute_bytes + cost.recompute_cast_bytes + cost.transient_bytes


def _stage_bytes(stage: Counts, bytes_by_part: Sequence[float]) -> float:
    return sum(count * part_bytes for count, part_bytes in zip(stage, bytes_by_part, strict=True) if count)


def _held_bytes(stage_bytes: Sequence[float], num_held: int) -> float:
    """Return the bytes of `num_held` activations; `stage_bytes` are those of one activation of each stage."""
    num_per_stage, remainder = divmod(num_held, len(stage_bytes))
    return num_per_stage * sum(stage_bytes) + sum(sorted(stage_bytes, reverse=True)[:remainder])
