"""Bytes of one rank at its highest moment: in backward, with its activations, or while the optimizer steps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace

from paceline.plan.candidate import Candidate
from paceline.plan.chain import Chain, Counts
from paceline.plan.efficiency import Efficiency
from paceline.plan.facts import ModelFacts
from paceline.plan.hardware import Device
from paceline.plan.work import Work, compute_bytes

_BUCKET = 25 << 20
_CPU_BUCKET = 10 << 20
_LARGEST = 1 / 3  # of a block's parameters, in its largest tensor; an end is mostly one tensor


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of one rank by what they are for, at its highest moment; `host_bytes` lie on the host, outside of the sum.

    `master` are copies of parameters in a wider type: none, since parameters are kept in their own type and products
    take copies (`activations`) or gathered ones (`gathered`). `temporaries` live within an operation.
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
        """All of them on the device."""
        state = self.parameters + self.gradients + self.optimizer + self.master
        return state + self.activations + self.gathered + self.buffers + self.temporaries + self.slack + self.reserve

    def fuller(self, factor: float) -> "Memory":
        """So many times as much, where that is more: what is not known of it is slack."""
        more = max(0.0, factor - 1) * (self.peak_bytes - self.reserve)
        return replace(self, slack=self.slack + more) if more else self

    @property
    def state_bytes(self) -> float:
        """What stays from step to step."""
        return self.parameters + self.gradients + self.optimizer + self.master

    @property
    def parts(self) -> dict[str, float]:
        """By name."""
        return {name: getattr(self, name) for name in PARTS}


PARTS = tuple(field.name for field in fields(Memory) if field.name != "host_bytes")


@dataclass(frozen=True, kw_only=True)
class Elements:
    """A rank's parameters before data parallelism cuts them: numbers of elements.

    `dense` may be sharded, `experts` lie whole on their ep ranks; `ends` of the dense are in no block, `block` is the
    largest block's, `end` are those whose gradients come last: the first part's, or a block's. `trained` is the part of
    1 that has gradients, `large` are in tensors that travel alone.
    """

    dense: float
    experts: float
    ends: float
    block: float
    end: float
    trained: float
    large: float
    buffer_bytes: float


def elements_of(facts: ModelFacts, chain: Chain, counts: Counts, *, tp: int, ep: int) -> Elements:
    """Of these parts, on one of `tp` × `ep` ranks. What the ends share is held once where both are on the rank."""
    each = [
        part.whole_parameters + (part.split_parameters + (part.expert_parameters if ep == 1 else 0)) / tp
        for part in chain.parts
    ]
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
        large=sum(count * part.large_parameters for count, part in parts) / tp,
        buffer_bytes=sum(count * part.buffer_bytes for count, part in parts),
    )


def static_bytes(elements: Elements, candidate: Candidate, facts: ModelFacts) -> tuple[float, float, float]:
    """Parameters, gradients and optimizer state of a rank, wherever they lie (Rajbhandari et al., "ZeRO", 2020)."""
    zero, shard, each = candidate.zero, candidate.dp_shard, facts.element_bytes
    held = [elements.dense / (shard if zero >= stage else 1) + elements.experts for stage in (3, 2, 1)]
    parameters, gradients, optimizer = held
    return (
        each * parameters,
        each * gradients * elements.trained,
        facts.optimizer.state_bytes * optimizer * elements.trained,
    )


@dataclass(frozen=True, kw_only=True)
class Alive:
    """A rank's activations: in how many stage activations, of at most so many bytes each, and of one moment."""

    held: int
    stage_bytes: float
    cast_bytes: float
    again_bytes: float
    again_cast_bytes: float
    moment_bytes: float
    border_bytes: float

    @property
    def bytes(self) -> float:
        """What waits for backward, and one block that runs again."""
        return self.narrow_bytes + self.held * self.cast_bytes + self.again_cast_bytes

    @property
    def narrow_bytes(self) -> float:
        """The same where weights are gathered in the precision of products, so that there are no copies of them."""
        return self.held * self.stage_bytes + self.again_bytes


def alive_of(works: Sequence[Work], stages: Sequence[Counts], *, held: int) -> Alive:
    """Of one rank's stages; the fullest of them counts for all."""
    totals = [sum(count * work.kept_bytes for count, work in zip(s, works, strict=True) if count) for s in stages]
    casts = [sum(count * work.cast_bytes for count, work in zip(s, works, strict=True) if count) for s in stages]
    there = [work for place, work in enumerate(works) if any(s[place] for s in stages)]
    return Alive(
        held=held,
        stage_bytes=max(totals),
        cast_bytes=max(casts),
        again_bytes=max(work.again_bytes for work in there),
        again_cast_bytes=max(work.again_cast_bytes for work in there),
        moment_bytes=max(work.moment_bytes for work in there),
        border_bytes=max(work.border_bytes for work in there),
    )


def memory_of(
    candidate: Candidate, facts: ModelFacts, elements: Elements, alive: Alive, *, device: Device, efficiency: Efficiency
) -> Memory:
    """The higher of its two moments."""
    parameters, gradients, optimizer = static_bytes(elements, candidate, facts)
    own = {"parameters": parameters + elements.buffer_bytes, "gradients": gradients, "optimizer": optimizer}
    host = 0.0
    if "parameters" in candidate.offload:
        host += parameters + gradients
        own |= {"parameters": elements.buffer_bytes, "gradients": 0.0}
    moment = facts.optimizer.moment_bytes * elements.trained
    moment *= elements.dense / (candidate.dp_shard if candidate.zero else 1) + elements.experts
    stepping = {"temporaries": moment * ("parameters" not in candidate.offload)}
    if candidate.zero in (1, 2):
        stepping["buffers"] = min(4.0 * _bucket(device), parameters)
    working = {
        "activations": alive.bytes if candidate.params == "fp32" else alive.narrow_bytes,
        "gathered": _gathered(candidate, facts, elements),
        "buffers": sum(_buffers(candidate, facts, elements, device)) + 2 * alive.border_bytes * (candidate.pp > 1),
        "temporaries": alive.moment_bytes,
    }
    if "optimizer" in candidate.offload:
        host += optimizer
        own["optimizer"] = 0.0
        if "parameters" not in candidate.offload:
            stepping["optimizer"] = optimizer  # it is moved to the device for the step
    moments = [_at(own, phase, device, efficiency, host) for phase in (working, stepping)]
    return max(moments, key=lambda memory: memory.peak_bytes)


def _at(own: dict[str, float], phase: dict[str, float], device: Device, efficiency: Efficiency, host: float) -> Memory:
    slack = efficiency.slack * sum(size for name, size in phase.items() if name != "optimizer")
    return Memory(**{**own, **phase}, slack=slack, reserve=device.reserve_bytes, host_bytes=host)


def _gathered(candidate: Candidate, facts: ModelFacts, elements: Elements) -> float:
    """The units at work and ahead, the buffer they are gathered in, and what is in no unit."""
    if candidate.zero < 3:
        return 0.0
    each = compute_bytes("bf16") if candidate.params == "bf16" else facts.element_bytes
    return each * (elements.ends + 3 * elements.block)


def _bucket(device: Device) -> int:
    return _BUCKET if device.is_accelerator else _CPU_BUCKET


def _buffers(candidate: Candidate, facts: ModelFacts, elements: Elements, device: Device) -> Iterator[float]:
    """Gradients under way: two buffers of whole ones, or those that share buffers once more."""
    each = facts.element_bytes * elements.trained
    if candidate.zero >= 2:
        largest = each * max(elements.ends, elements.block * _LARGEST)
        two = min(2 * max(_bucket(device), largest), 2 * each * elements.dense)
        yield two if device.is_accelerator else 2 * two  # gloo copies what it reduces and scatters
    elif candidate.replicas * candidate.cp > 1:
        yield each * max(0.0, elements.dense + elements.experts - elements.large)
