"""Peak memory of one rank: in backward, with its activations, or during the optimizer step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter

from paceline.planner.cost.activations import ActivationPeak
from paceline.planner.cost.layer_cost import compute_bytes
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.hardware.cluster import Device
from paceline.planner.hardware.efficiency import Efficiency
from paceline.planner.model_costs.layer_chain import Chain, Counts
from paceline.planner.model_costs.model_profile import LayerProfile, ModelProfile

_BUCKET = 25 << 20
_FIRST_BUCKET = 1 << 20
_CPU_BUCKET = 10 << 20
LARGE_BYTES = 16 << 20
_LARGEST = 1 / 3  # of a block's parameters are in its largest tensor, if unknown; an end is mostly one tensor


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of one rank at its peak, by purpose; `host_bytes` are on the host and not part of the sum.

    `master` are copies of parameters in a wider type: always 0, because parameters keep their own type and matmuls use
    cast copies (in `activations`) or gathered ones (`gathered`). `temporaries` live within one operation.
    """

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    master: float = 0.0
    activations: float = 0.0
    gathered: float = 0.0
    buffers: float = 0.0
    temporaries: float = 0.0
    slack: float = 0.0
    reserve: float = 0.0
    host_bytes: float = 0.0

    @property
    def peak_bytes(self) -> float:
        """The sum of all parts on the device."""
        state = self.parameters + self.gradients + self.optimizer + self.master
        return state + self.activations + self.gathered + self.buffers + self.temporaries + self.slack + self.reserve

    def fuller(self, factor: float) -> "Memory":
        """Return this memory scaled by `factor` if that is above 1; the additional bytes are slack."""
        more = max(0.0, factor - 1) * (self.peak_bytes - self.reserve)
        return replace(self, slack=self.slack + more) if more else self

    @property
    def state_bytes(self) -> float:
        """The bytes that persist from step to step: parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer + self.master

    @property
    def parts(self) -> dict[str, float]:
        """The bytes of each part, by name."""
        return {name: getattr(self, name) for name in PARTS}


PARTS = tuple(field.name for field in fields(Memory) if field.name != "host_bytes")


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The parameter elements of a rank before data parallelism shards them.

    `dense` may be sharded; `experts` stay whole on their ep ranks. `ends` are the dense ones outside of blocks, `block`
    those of the largest block, `end` those whose gradients come last: the first part's or a block's. `trained` is the
    fraction that has gradients, `large` are in tensors that are sent unbucketed, `largest_block` and `largest_end` are
    in the largest tensor.
    """

    dense: float
    experts: float
    ends: float
    block: float
    end: float
    trained: float
    large: float
    largest_block: float
    largest_end: float
    buffer_bytes: float

    @property
    def largest(self) -> float:
        """The elements of the largest tensor."""
        return max(self.largest_block, self.largest_end)


def elements_of(facts: ModelProfile, chain: Chain, counts: Counts, *, tp: int, ep: int) -> Elements:
    """Return the elements of these parts on one of `tp` × `ep` ranks; weights tied between both ends count once."""
    each = [part.held_parameters(tp=tp, ep=ep) for part in chain.parts]
    tied = facts.tied / (tp if facts.last.split_parameters >= facts.tied else 1) if counts[0] and counts[1] else 0.0
    parts = list(zip(counts, chain.parts, strict=True))
    every = sum(count * part.parameters for count, part in parts)
    frozen = sum(count * part.frozen_parameters for count, part in parts)
    block = max((size for count, size in zip(counts[2:], each[2:], strict=True) if count), default=0.0)
    dense = sum(count * size for count, size in zip(counts, each, strict=True)) - tied
    ends = sum(count * size for count, size in zip(counts[:2], each[:2], strict=True)) - tied
    return Elements(
        dense=dense,
        experts=sum(count * part.expert_parameters / ep for count, part in parts) if ep > 1 else 0.0,
        ends=ends,
        block=block,
        end=min(dense, max(counts[0] * each[0], block)),
        trained=1 - frozen / every if every else 0.0,
        large=_alone(facts, parts, tp=tp),
        largest_block=max((_largest(part, _LARGEST) for count, part in parts[2:] if count), default=0.0) / tp,
        largest_end=max((_largest(part, 1.0) for count, part in parts[:2] if count), default=0.0) / tp,
        buffer_bytes=sum(count * part.buffer_bytes for count, part in parts),
    )


def _alone(facts: ModelProfile, parts: Sequence[tuple[int, LayerProfile]], *, tp: int) -> float:
    """Return the elements of tensors that are sent without a bucket.

    These are the large ones, except the model's first, whose buffer has room for flags, and in addition its last if it
    alone fills the small bucket that is sent first.
    """
    each, (first, last) = facts.element_bytes / tp, (part.tensors if count else () for count, part in parts[:2])
    found = 0.0
    for count, part in parts:
        large = sum(n for n in part.tensors if each * n > LARGE_BYTES) if part.tensors else part.large_parameters
        found += count * large / tp
    if first and each * first[0] > LARGE_BYTES:
        found -= first[0] / tp
    if last and _FIRST_BUCKET <= each * last[-1] <= LARGE_BYTES:
        found += last[-1] / tp
    return found


def _largest(part: LayerProfile, share: float) -> float:
    return max(part.tensors, default=0) or share * part.parameters


def static_bytes(elements: Elements, candidate: Candidate, facts: ModelProfile) -> tuple[float, float, float]:
    """Return a rank's bytes of parameters, gradients and optimizer state, on device or host.

    The shares are those of the ZeRO stage (Rajbhandari et al., "ZeRO", 2020).
    """
    zero, shard, each = candidate.zero, candidate.dp_shard, facts.element_bytes
    held = [elements.dense / (shard if zero >= stage else 1) + elements.experts for stage in (3, 2, 1)]
    parameters, gradients, optimizer = held
    return (
        each * parameters,
        each * gradients * elements.trained,
        facts.optimizer.state_bytes * optimizer * elements.trained,
    )


def memory_of(
    candidate: Candidate,
    facts: ModelProfile,
    elements: Elements,
    alive: ActivationPeak,
    *,
    device: Device,
    efficiency: Efficiency,
) -> Memory:
    """Return the memory of a rank at the fullest moment of its step."""
    parameters, gradients, optimizer = static_bytes(elements, candidate, facts)
    own = {"parameters": parameters + elements.buffer_bytes, "gradients": gradients, "optimizer": optimizer}
    host, is_out = 0.0, "parameters" in candidate.offload
    if is_out:
        host += parameters + gradients
        own |= {"parameters": elements.buffer_bytes, "gradients": 0.0}
    stepping = _stepping(candidate, facts, elements, device)
    working = list(_working(candidate, facts, elements, alive, device))
    if "optimizer" in candidate.offload:
        host += optimizer
        own["optimizer"] = 0.0
        if not is_out:
            stepping["optimizer"] = optimizer  # moved to the device for the step
    if candidate.zero < 2 and alive.is_before_gradients:
        phases = [*({**phase, "gradients": 0.0} for phase in working[:-1]), working[-1]]
    else:
        phases = working
    reserve = device.reserve_bytes
    moments = [(_peak_bytes(own, phase, efficiency, reserve), phase) for phase in (*phases, stepping)]
    fullest = max(moments, key=itemgetter(0))[1]
    return Memory(**(own | fullest), slack=_slack(fullest, efficiency), reserve=reserve, host_bytes=host)


def _stepping(candidate: Candidate, facts: ModelProfile, elements: Elements, device: Device) -> dict[str, float]:
    """Return the bytes during the optimizer step, and of gathering the updated parameters, two units at a time."""
    moment = facts.optimizer.moment_bytes * elements.trained
    moment *= elements.dense / (candidate.dp_shard if candidate.zero else 1) + elements.experts
    phase = {"temporaries": moment * ("parameters" not in candidate.offload)}
    if candidate.zero in (1, 2):
        each = facts.element_bytes * elements.trained
        whole = _unit(elements.largest, each * elements.dense, each, device)
        phase["buffers"] = min(2 * whole, each * elements.dense) * (1 + 1 / candidate.dp_shard)
    return phase


def _working(
    candidate: Candidate, facts: ModelProfile, elements: Elements, alive: ActivationPeak, device: Device
) -> Iterator[dict[str, float]]:
    """Yield the bytes at the candidate peaks of backward.

    These are: at the loss, at the head's gradient, in the last block's backward, and in the first block's, when all
    gradients exist.
    """
    wide = candidate.params == "fp32"
    each, trained = facts.element_bytes, facts.element_bytes * elements.trained
    gathered = compute_bytes("bf16") if candidate.params == "bf16" else each
    blocks = elements.block * gathered * (candidate.zero == 3)
    root = elements.ends * gathered * (candidate.zero == 3)
    borders = 2 * alive.border_bytes * (candidate.pp > 1)
    flat = 0.0
    if candidate.zero < 2 and candidate.replicas * candidate.cp > 1:
        flat = trained * max(0.0, elements.dense + elements.experts - elements.large)
    waiting = filling = end = 0.0
    if candidate.zero >= 2:
        dense = trained * elements.dense
        unit = _unit(elements.largest_block, dense - trained * elements.ends, trained, device)
        end = _unit(elements.largest_end, trained * elements.ends, trained, device)
        # gloo keeps inputs and copies of a reduction until it is waited for; others keep only the result, of two units
        share = 1 / candidate.dp_shard if device.is_accelerator else 2 + 1 / candidate.dp_shard
        waiting, filling = min(dense, end + unit) * share, min(dense, unit) * (1 + 2 * share)
    cast = alive.cast_bytes * wide
    yield {
        "activations": alive.held_bytes + cast,
        "gathered": root + blocks,
        "buffers": flat + waiting + borders,
        "temporaries": alive.tail_moment_bytes,
    }
    yield {
        "activations": alive.held_bytes + cast - alive.tail_bytes - alive.tail_cast_bytes * wide,
        "gathered": root + blocks,
        "buffers": flat + waiting + end + borders,
        "temporaries": trained * elements.largest_end,
    }
    again = alive.again_bytes + alive.again_cast_bytes * wide
    yield {
        "activations": alive.held_bytes + cast - alive.tail_bytes - alive.tail_cast_bytes * wide + again,
        "gathered": root + (2 + (candidate.pp > 1)) * blocks,  # a pipeline also prefetches a unit of another microbatch
        "buffers": flat + filling + borders,
        "temporaries": alive.moment_bytes,
    }
    yield {
        "activations": alive.end_bytes,
        "gathered": root + blocks,
        "buffers": filling + borders,
    }


def _unit(largest: float, every: float, each: float, device: Device) -> float:
    """Return the bytes of one unit of gradients: one large tensor, or as many as fill a bucket."""
    if each * largest > LARGE_BYTES:
        return each * largest
    return min(every, (_BUCKET if device.is_accelerator else _CPU_BUCKET) + each * largest / 2)


def _slack(phase: Mapping[str, float], efficiency: Efficiency) -> float:
    passing = phase if "optimizer" not in phase else {n: size for n, size in phase.items() if n != "optimizer"}
    return efficiency.slack * sum(passing.values())


def _peak_bytes(own: Mapping[str, float], phase: Mapping[str, float], efficiency: Efficiency, reserve: float) -> float:
    """Return `Memory.peak_bytes` for a phase, without building a `Memory`."""
    at = phase.get
    state = own["parameters"] + at("gradients", own["gradients"]) + at("optimizer", own["optimizer"])
    passing = state + at("activations", 0.0) + at("gathered", 0.0) + at("buffers", 0.0) + at("temporaries", 0.0)
    return passing + _slack(phase, efficiency) + reserve
