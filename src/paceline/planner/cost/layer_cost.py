"""Roofline cost of one part of the model for one rank and microbatch: compute, messages and memory.

The roofline (Williams et al., 2009) takes matmuls at a fraction of the device's peak rate or, with few rows, at the
speed of reading the weights, and everything else at a fraction of the memory bandwidth. Backward costs twice the
matmuls, two and a half times the attention, whose scores are recomputed (Dao et al., 2022), and twice the rest.
"""

from dataclasses import dataclass, replace
from typing import Any

from paceline.planner.hardware.cluster import Device, Group
from paceline.planner.hardware.efficiency import Efficiency
from paceline.planner.model_costs.model_profile import NOTHING, ActivationBytes, BatchScaling, LayerProfile

_SHORT = {"bf16": 2, "fp16": 2, "float8": 2}  # operands of 8-bit matmuls are stored in 16 bits
_ATTENTION_BACK = 2.5


@dataclass(frozen=True, kw_only=True)
class LayerPlacement:
    """The microbatch of a rank, how its part of the model is split, and the groups it communicates with inside it."""

    samples: int
    length: int
    precision: str
    sequence: bool
    remat: str
    tp: Group
    cp: Group
    ep: Group


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """The cost of one part for one microbatch on one rank.

    Seconds: `forward`, the gradients of inputs (`input`) and of weights (`weight`), and recomputing the forward
    (`again`); then the exposed messages inside the part, by axis and by direction. `hides` is the forward and backward
    compute that can overlap other messages; it excludes compute that already overlaps keys and values.

    Bytes: `kept_bytes` from forward to backward, and in addition `cast_bytes` of weight copies in another precision;
    `again_bytes` and `again_cast_bytes` during recomputation; `border_bytes` to the next part; `moment_bytes` of
    temporaries.
    """

    forward: float
    input: float
    weight: float
    again: float
    tensor: float
    context: float
    experts: float
    messages_forward: float
    messages_backward: float
    hides: tuple[float, float]
    kept_bytes: float
    cast_bytes: float
    again_bytes: float
    again_cast_bytes: float
    border_bytes: float
    moment_bytes: float

    @property
    def seconds(self) -> float:
        """The seconds of forward and backward, with all exposed messages."""
        return self.forward + self.input + self.weight + self.again + self.messages_forward + self.messages_backward


def layer_cost(
    part: LayerProfile,
    *,
    is_block: bool,
    split: LayerPlacement,
    device: Device,
    efficiency: Efficiency,
    is_compiled: bool = False,
) -> LayerCost:
    """Return the roofline cost of one part on one rank for one microbatch. `remat` applies to blocks only."""
    remat = split.remat if is_block else "none"
    seen = split.remat if part.ways else remat
    part = replace(part, moved_bytes=part.fused_bytes) if is_compiled and part.fused_bytes != NOTHING else part
    forward, attention, rest = _computes(part, split, device, efficiency, is_block=is_block)
    trained = 1 - part.frozen_parameters / part.parameters if part.parameters else 0.0
    start = efficiency.part_seconds
    tensor, context, experts = _messages(part, split, attention, efficiency)
    again_messages = (tensor[0] + experts[0]) if remat == "full" else 0.0
    again_context = context[0] if remat != "none" else 0.0  # ring attention keeps no scores
    kept, cast, again_bytes, again_cast = (_seen if part.ways else _kept)(part, split, device, seen)
    busy = attention if split.cp.size > 1 else 0.0
    again = {"none": 0.0, "selective": rest + start}.get(remat, forward + attention + rest + start)
    back = forward * (1 + trained) + _ATTENTION_BACK * (attention - busy) + 2 * rest + start
    border = part.output_bytes.at(samples=split.samples, length=split.length, cp=split.cp.size)
    ring = _ring_bytes(part, split) if split.cp.size > 1 else 0.0
    peak = part.peak_bytes.at(samples=split.samples, length=split.length, cp=split.cp.size) * _divided(part, split)
    if part.ways:
        peak = 0.0
    return LayerCost(
        forward=forward + attention + rest + start,
        input=forward + _ATTENTION_BACK * attention + 2 * rest + start,
        weight=forward * trained,
        again=again,
        hides=(forward + attention - busy + rest + start, back + again),
        tensor=sum(tensor) + (tensor[0] if remat == "full" else 0.0),
        context=sum(context) + again_context,
        experts=sum(experts) + (experts[0] if remat == "full" else 0.0),
        messages_forward=tensor[0] + context[0] + experts[0],
        messages_backward=tensor[1] + context[1] + experts[1] + again_messages + again_context,
        kept_bytes=kept,
        cast_bytes=cast,
        again_bytes=again_bytes,
        again_cast_bytes=again_cast,
        border_bytes=border / (split.tp.size if split.sequence else 1),
        moment_bytes=peak + 2 * ring,
    )


def compute_bytes(precision: str) -> int:
    """Return the bytes per element of a matmul operand in this precision."""
    return _SHORT.get(precision, 4)


def _divided(part: LayerProfile, split: LayerPlacement) -> float:
    """Return the fraction of the part's work that tp leaves a rank. Work is split as the parameters are."""
    tp = split.tp.size
    experts = part.expert_parameters if split.ep.size == 1 else 0
    cut, whole = part.split_parameters + experts, part.whole_parameters
    return 1.0 if tp == 1 or not cut else (cut / tp + whole) / (cut + whole)


def _computes(
    part: LayerProfile, split: LayerPlacement, device: Device, efficiency: Efficiency, *, is_block: bool
) -> tuple[float, float, float]:
    """Return the forward seconds of matmuls, attention and the rest. Only blocks have matmuls in 8 bits."""
    own = {"samples": split.samples, "length": split.length, "cp": split.cp.size}
    tp, divided = split.tp.size, _divided(part, split)
    usual = "bf16" if split.precision == "float8" else split.precision
    rate = efficiency.rate(device, split.precision if is_block else usual)
    scores_rate, bandwidth = efficiency.rate(device, usual), device.bytes_per_second * efficiency.memory
    products = part.matmul_flops.at(**own)
    apart = part.expert_flops.at(**own) if split.ep.size > 1 else 0.0
    held = part.whole_parameters + part.split_parameters / tp
    held += part.expert_parameters / (split.ep.size if split.ep.size > 1 else tp)
    read = held * compute_bytes(split.precision) / bandwidth if products else 0.0
    forward = max(((products - apart) * divided + apart) / (rate * efficiency.matmul), read)
    attention = part.attention_flops.at(**own) / (scores_rate * efficiency.attention) / (tp if divided < 1 else 1)
    whole, cut = (part.saved_bytes.at(**own), part.split_saved_bytes.at(**own))
    there = whole / (tp if split.sequence else 1) + cut / tp
    rest = part.moved_bytes.at(**own) / bandwidth * (there / (whole + cut) if whole + cut else 1.0)
    return forward, attention, rest


def _messages(
    part: LayerProfile, split: LayerPlacement, attention: float, efficiency: Efficiency
) -> tuple[tuple[float, float], tuple[float, float], tuple[float, float]]:
    """Return the exposed seconds of messages over tp, cp and ep, each for forward and backward."""
    own = {"samples": split.samples, "length": split.length, "cp": split.cp.size}
    tensor = split.tp.all_reduce(part.tp_bytes.at(**own), calls=part.tp_calls)
    experts = split.ep.all_to_all(part.ep_bytes.at(**own), calls=4) if part.ep_bytes.at(**own) else 0.0
    context = (0.0, 0.0)
    if split.cp.size > 1 and part.attention_flops.at(**own):
        ring, size = _ring_bytes(part, split), split.cp.size
        wide = 4 / compute_bytes(split.precision)  # gradients of keys and values are summed in float32
        out = (size - 1) * split.cp.pass_on(ring)
        back = out + size * split.cp.pass_on(ring * wide)
        hidden = efficiency.overlap * attention
        context = (max(0.0, out - hidden), max(0.0, back - _ATTENTION_BACK * hidden))
    return (tensor, tensor), context, (experts, experts)


def _ring_bytes(part: LayerProfile, split: LayerPlacement) -> float:
    """Return the bytes of keys and values of a rank's positions; without `cp_bytes`, as many heads as queries."""
    own = {"samples": split.samples, "length": split.length, "cp": split.cp.size}
    if not part.attention_flops.at(**own):
        return 0.0
    return (part.cp_bytes.at(**own) or 2 * part.output_bytes.at(**own)) / split.tp.size


def _kept(part: LayerProfile, split: LayerPlacement, device: Device, remat: str) -> tuple[float, float, float, float]:
    """Return the bytes kept for backward and of weight copies, then both again for recomputation."""
    own = {"samples": split.samples, "length": split.length, "cp": split.cp.size}
    tp = split.tp.size
    cast = (part.saved_bytes.fixed + part.split_saved_bytes.fixed / tp) * (split.precision in _SHORT)
    whole, cut = part.saved_bytes.at(**own), part.split_saved_bytes.at(**own)
    fused = part.attention_saved_bytes.at(**own) if device.is_accelerator else 0.0
    taken = min(cut, fused)
    cut, whole = cut - taken, max(0.0, whole - (fused - taken))
    every = whole / (tp if split.sequence else 1) + cut / tp - cast
    if remat == "none":
        return every, cast, 0.0, 0.0
    kept = part.output_bytes.at(**own) / (tp if split.sequence else 1)  # its input, as large as its output
    if remat == "selective":
        named = part.selective_saved_bytes.at(**own)
        kept += named * (every / (whole + cut - cast) if whole + cut > cast else 1.0) if named else every
    kept = min(kept, every)
    return kept, 0.0, every - kept, cast


def _seen(part: LayerProfile, split: LayerPlacement, device: Device, remat: str) -> tuple[float, float, float, float]:
    """Return what `_kept` returns, for a part whose memory was measured.

    All that remains of the recomputation counts as needed for a moment. Bytes that do not scale with the microbatch are
    weight copies, and for a moment their gradients.
    """
    way, own = part.ways.get(remat, part.ways["none"]), _own(split)
    plain = part.ways["none"].kept
    copies = replace(plain, amount=BatchScaling(fixed=max(0.0, plain.amount.fixed) * (split.precision in _SHORT)))
    size = split.cp.size
    casts, kept, moment = (
        copies.at(**own),
        _in_ring(way.kept, size, 0.0).at(**own),
        _in_ring(way.moment, size, 1 / size).at(**own),
    )
    if remat == "none" or "none" not in part.ways:
        return max(0.0, kept - casts), min(casts, kept), moment, 0.0
    again = min(casts, moment)
    return kept, 0.0, moment - again, again


def _in_ring(holding: ActivationBytes, cp: int, left: float) -> ActivationBytes:
    """Scale the pairwise scores for cp: ring attention keeps none, and has those of one rank's keys at a time."""
    amount = holding.amount
    return holding if cp == 1 else replace(holding, amount=replace(amount, pair=left * max(0.0, amount.pair)))


def _own(split: LayerPlacement) -> dict[str, Any]:
    return {
        "samples": split.samples, "length": split.length, "cp": split.cp.size, "tp": split.tp.size,
        "sequence": split.sequence,
    }  # fmt: skip
