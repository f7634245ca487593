"""Estimate the cost of one part of the model for one rank and microbatch: compute, messages and memory.

In the roofline model (Williams et al., 2009), matmuls run at a fraction of the device's peak rate or, with few rows, at
the speed of reading the weights. All other operations run at a fraction of the memory bandwidth. For matmuls and other
operations, backward takes twice as long as forward. For attention, it takes 2.5 times as long, because it computes the
scores again (Dao et al., 2022).
"""

from dataclasses import dataclass, replace
from typing import Any

from paceline.planner.hardware.cluster import Device, Group
from paceline.planner.hardware.efficiency import Efficiency
from paceline.planner.model_costs.model_profile import ZERO, ActivationBytes, BatchScaling, LayerProfile

_SHORT_BYTES = {"bf16": 2, "fp16": 2, "float8": 2}  # operands of 8-bit matmuls are stored in 16 bits
_ATTENTION_BACKWARD_RATIO = 2.5


@dataclass(frozen=True, kw_only=True)
class LayerPlacement:
    """The microbatch of a rank, the options of the layout, and the groups of ranks that split a layer."""

    samples: int
    """The samples of the microbatch."""
    length: int
    """The positions of a sample."""
    precision: str
    """The precision of matmuls."""
    sequence: bool
    """True with sequence parallelism."""
    remat: str
    """The activation checkpointing of blocks."""
    tp: Group
    cp: Group
    ep: Group


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The cost of one part for one microbatch on one rank.

    The exposed seconds of messages are those that compute does not hide.
    """

    forward: float
    """Seconds of the forward, without messages."""
    backward_input: float
    """Seconds of the backward for inputs, without messages and recomputation."""
    backward_weight: float
    """Seconds of the backward for weights."""
    recompute: float
    """Seconds of the recomputed forward, without messages."""
    tensor: float
    """Exposed seconds of messages over tp in forward, recomputation and backward together."""
    context: float
    """Exposed seconds of messages over cp in forward, recomputation and backward together."""
    experts: float
    """Exposed seconds of messages over ep in forward, recomputation and backward together."""
    messages_forward: float
    """Exposed seconds of all messages in the first forward, without recomputation."""
    messages_backward: float
    """Exposed seconds of all messages in backward, including those of recomputation."""
    overlappable_seconds: tuple[float, float]
    """Compute seconds of (forward, backward) that can overlap data-parallel messages.

    Compute that already overlaps the exchange of keys and values over cp is excluded.
    """
    kept_bytes: float
    """Bytes that are held from forward to backward."""
    cast_bytes: float
    """Bytes of weight copies in another precision that are also held from forward to backward."""
    recompute_bytes: float
    """Bytes of recomputed activations; for a part whose memory was measured, all transient bytes."""
    recompute_cast_bytes: float
    """Bytes of the weight copies that recomputation makes."""
    border_bytes: float
    """Bytes that go to the next part."""
    transient_bytes: float
    """Bytes of other temporaries within forward or backward."""

    @property
    def seconds(self) -> float:
        """The seconds of forward and backward, with all exposed messages."""
        return (
            self.forward
            + self.backward_input
            + self.backward_weight
            + self.recompute
            + self.messages_forward
            + self.messages_backward
        )


def layer_cost(
    part: LayerProfile,
    *,
    is_block: bool,
    placement: LayerPlacement,
    device: Device,
    efficiency: Efficiency,
    is_compiled: bool = False,
) -> LayerCost:
    """Return the roofline cost of one part on one rank for one microbatch.

    Only blocks are recomputed (`remat`). If the memory of a part was measured (`part.ways`), it was measured once for
    each `remat` of the blocks. The measurement for the layout's `remat` is used, also for a part that is not a block.
    """
    remat = placement.remat if is_block else "none"
    measured_remat = placement.remat if part.ways else remat
    part = replace(part, moved_bytes=part.fused_bytes) if is_compiled and part.fused_bytes != ZERO else part
    matmul, attention, other = _compute_seconds(part, placement, device, efficiency, is_block=is_block)
    trained_fraction = 1 - part.frozen_parameters / part.parameters if part.parameters else 0.0
    launch = efficiency.part_seconds
    tensor, context, experts = _message_seconds(part, placement, attention, efficiency)
    recompute_messages = (tensor[0] + experts[0]) if remat == "full" else 0.0
    recompute_context = context[0] if remat != "none" else 0.0  # ring attention saves no scores
    kept_bytes, cast_bytes, recompute_bytes, recompute_cast_bytes = (
        _measured_bytes if part.ways else _estimated_bytes
    )(part, placement, device, measured_remat)
    overlapped_attention = attention if placement.cp.size > 1 else 0.0
    recompute = {"none": 0.0, "selective": other + launch}.get(remat, matmul + attention + other + launch)
    backward = (
        matmul * (1 + trained_fraction)
        + _ATTENTION_BACKWARD_RATIO * (attention - overlapped_attention)
        + 2 * other
        + launch
    )
    border_bytes = part.output_bytes.evaluate(samples=placement.samples, length=placement.length, cp=placement.cp.size)
    ring_bytes = _ring_bytes(part, placement) if placement.cp.size > 1 else 0.0
    peak_bytes = part.peak_bytes.evaluate(
        samples=placement.samples, length=placement.length, cp=placement.cp.size
    ) * _tp_fraction(part, placement)
    if part.ways:
        peak_bytes = 0.0
    return LayerCost(
        forward=matmul + attention + other + launch,
        backward_input=matmul + _ATTENTION_BACKWARD_RATIO * attention + 2 * other + launch,
        backward_weight=matmul * trained_fraction,
        recompute=recompute,
        overlappable_seconds=(matmul + attention - overlapped_attention + other + launch, backward + recompute),
        tensor=sum(tensor) + (tensor[0] if remat == "full" else 0.0),
        context=sum(context) + recompute_context,
        experts=sum(experts) + (experts[0] if remat == "full" else 0.0),
        messages_forward=tensor[0] + context[0] + experts[0],
        messages_backward=tensor[1] + context[1] + experts[1] + recompute_messages + recompute_context,
        kept_bytes=kept_bytes,
        cast_bytes=cast_bytes,
        recompute_bytes=recompute_bytes,
        recompute_cast_bytes=recompute_cast_bytes,
        border_bytes=border_bytes / (placement.tp.size if placement.sequence else 1),
        transient_bytes=peak_bytes + 2 * ring_bytes,
    )


def compute_bytes(precision: str) -> int:
    """Return the bytes per element of a matmul operand in this precision."""
    return _SHORT_BYTES.get(precision, 4)


def _tp_fraction(part: LayerProfile, placement: LayerPlacement) -> float:
    """Return the fraction of the part's work that one tp rank does. Work is divided in the same way as parameters."""
    tp = placement.tp.size
    experts = part.expert_parameters if placement.ep.size == 1 else 0
    split_parameters, whole_parameters = part.split_parameters + experts, part.whole_parameters
    return (
        1.0
        if tp == 1 or not split_parameters
        else (split_parameters / tp + whole_parameters) / (split_parameters + whole_parameters)
    )


def _compute_seconds(
    part: LayerProfile, placement: LayerPlacement, device: Device, efficiency: Efficiency, *, is_block: bool
) -> tuple[float, float, float]:
    """Return the forward seconds of matmuls, attention and other operations. Only blocks have 8-bit matmuls."""
    shape = {"samples": placement.samples, "length": placement.length, "cp": placement.cp.size}
    tp, tp_fraction = placement.tp.size, _tp_fraction(part, placement)
    attention_precision = "bf16" if placement.precision == "float8" else placement.precision
    rate = efficiency.rate(device, placement.precision if is_block else attention_precision)
    scores_rate, bandwidth = efficiency.rate(device, attention_precision), device.bytes_per_second * efficiency.memory
    matmul_flops = part.matmul_flops.evaluate(**shape)
    expert_flops = part.expert_flops.evaluate(**shape) if placement.ep.size > 1 else 0.0
    rank_parameters = part.whole_parameters + part.split_parameters / tp
    rank_parameters += part.expert_parameters / (placement.ep.size if placement.ep.size > 1 else tp)
    read_seconds = rank_parameters * compute_bytes(placement.precision) / bandwidth if matmul_flops else 0.0
    matmul = max(
        ((matmul_flops - expert_flops) * tp_fraction + expert_flops) / (rate * efficiency.matmul), read_seconds
    )
    attention = (
        part.attention_flops.evaluate(**shape) / (scores_rate * efficiency.attention) / (tp if tp_fraction < 1 else 1)
    )
    replicated_bytes, split_bytes = (part.saved_bytes.evaluate(**shape), part.split_saved_bytes.evaluate(**shape))
    rank_bytes = replicated_bytes / (tp if placement.sequence else 1) + split_bytes / tp
    other = (
        part.moved_bytes.evaluate(**shape)
        / bandwidth
        * (rank_bytes / (replicated_bytes + split_bytes) if replicated_bytes + split_bytes else 1.0)
    )
    return matmul, attention, other


def _message_seconds(
    part: LayerProfile, placement: LayerPlacement, attention: float, efficiency: Efficiency
) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    """Return the exposed seconds of messages over tp, cp and ep, each for forward and backward."""
    shape = {"samples": placement.samples, "length": placement.length, "cp": placement.cp.size}
    tensor = placement.tp.all_reduce(part.tp_bytes.evaluate(**shape), calls=part.tp_calls)
    experts = (
        placement.ep.all_to_all(part.ep_bytes.evaluate(**shape), calls=4) if part.ep_bytes.evaluate(**shape) else 0.0
    )
    context = (0.0, 0.0)
    if placement.cp.size > 1 and part.attention_flops.evaluate(**shape):
        ring_bytes, size = _ring_bytes(part, placement), placement.cp.size
        gradient_ratio = 4 / compute_bytes(placement.precision)  # gradients of keys and values are summed in float32
        forward = (size - 1) * placement.cp.send(ring_bytes)
        backward = forward + size * placement.cp.send(ring_bytes * gradient_ratio)
        hidden = efficiency.overlap * attention
        context = (max(0.0, forward - hidden), max(0.0, backward - _ATTENTION_BACKWARD_RATIO * hidden))
    return (tensor, tensor), context, (experts, experts)


def _ring_bytes(part: LayerProfile, placement: LayerPlacement) -> float:
    """Return the bytes of a rank's keys and values, which it sends around the ring of cp ranks.

    If the profile has no `cp_bytes`, assume as many key heads as query heads.
    """
    shape = {"samples": placement.samples, "length": placement.length, "cp": placement.cp.size}
    if not part.attention_flops.evaluate(**shape):
        return 0.0
    return (part.cp_bytes.evaluate(**shape) or 2 * part.output_bytes.evaluate(**shape)) / placement.tp.size


def _estimated_bytes(
    part: LayerProfile, placement: LayerPlacement, device: Device, remat: str
) -> tuple[float, float, float, float]:
    """Estimate and return `kept_bytes`, `cast_bytes`, `recompute_bytes` and `recompute_cast_bytes` of a `LayerCost`."""
    shape = {"samples": placement.samples, "length": placement.length, "cp": placement.cp.size}
    tp = placement.tp.size
    cast_bytes = (part.saved_bytes.fixed + part.split_saved_bytes.fixed / tp) * (placement.precision in _SHORT_BYTES)
    replicated_bytes, split_bytes = part.saved_bytes.evaluate(**shape), part.split_saved_bytes.evaluate(**shape)
    fused_attention_bytes = part.attention_saved_bytes.evaluate(**shape) if device.is_accelerator else 0.0
    fused_split_bytes = min(split_bytes, fused_attention_bytes)
    split_bytes, replicated_bytes = (
        split_bytes - fused_split_bytes,
        max(0.0, replicated_bytes - (fused_attention_bytes - fused_split_bytes)),
    )
    saved_bytes = replicated_bytes / (tp if placement.sequence else 1) + split_bytes / tp - cast_bytes
    if remat == "none":
        return saved_bytes, cast_bytes, 0.0, 0.0
    # the input of the part, which is as large as its output
    kept_bytes = part.output_bytes.evaluate(**shape) / (tp if placement.sequence else 1)
    if remat == "selective":
        selective_bytes = part.selective_saved_bytes.evaluate(**shape)
        kept_bytes += (
            selective_bytes
            * (
                saved_bytes / (replicated_bytes + split_bytes - cast_bytes)
                if replicated_bytes + split_bytes > cast_bytes
                else 1.0
            )
            if selective_bytes
            else saved_bytes
        )
    kept_bytes = min(kept_bytes, saved_bytes)
    return kept_bytes, 0.0, saved_bytes - kept_bytes, cast_bytes


def _measured_bytes(
    part: LayerProfile, placement: LayerPlacement, device: Device, remat: str
) -> tuple[float, float, float, float]:
    """Return the values of `_estimated_bytes` for a part whose memory was measured.

    The measured transient memory (`moment`) includes the memory of recomputation. Bytes that do not depend on the
    microbatch are weight copies or, in transient memory, the gradients of these copies.
    """
    measured, shape = part.ways.get(remat, part.ways["none"]), _placement_shape(placement)
    kept_without_remat = part.ways["none"].kept
    weight_copies = replace(
        kept_without_remat,
        amount=BatchScaling(fixed=max(0.0, kept_without_remat.amount.fixed) * (placement.precision in _SHORT_BYTES)),
    )
    size = placement.cp.size
    cast_bytes, kept_bytes, transient_bytes = (
        weight_copies.evaluate(**shape),
        _scale_scores_for_cp(measured.kept, size, 0.0).evaluate(**shape),
        _scale_scores_for_cp(measured.moment, size, 1 / size).evaluate(**shape),
    )
    if remat == "none" or "none" not in part.ways:
        return max(0.0, kept_bytes - cast_bytes), min(cast_bytes, kept_bytes), transient_bytes, 0.0
    recompute_cast_bytes = min(cast_bytes, transient_bytes)
    return kept_bytes, 0.0, transient_bytes - recompute_cast_bytes, recompute_cast_bytes


def _scale_scores_for_cp(measured: ActivationBytes, cp: int, score_fraction: float) -> ActivationBytes:
    """Return the bytes with those of attention scores multiplied by `score_fraction`, if cp splits the sequence.

    Ring attention saves no scores. It computes only the scores for the keys of one rank at a time.
    """
    amount = measured.amount
    return (
        measured if cp == 1 else replace(measured, amount=replace(amount, pair=score_fraction * max(0.0, amount.pair)))
    )


def _placement_shape(placement: LayerPlacement) -> dict[str, Any]:
    """Return the arguments of `ActivationBytes.evaluate`."""
    return {
        "samples": placement.samples, "length": placement.length, "cp": placement.cp.size, "tp": placement.tp.size,
        "sequence": placement.sequence,
    }  # fmt: skip
