"""The profile of a model in numbers: `measured_planning/profile` measures it, the planner reads nothing else."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.config.from_json import as_written


@dataclass(frozen=True, kw_only=True)
class BatchScaling:
    """A number that scales with the microbatch: `samples`, each of `length` positions.

    `pair` counts per pair of positions of a sample, as attention scores do. Data without a length has it all in
    `sample`.
    """

    fixed: float = 0.0
    sample: float = 0.0
    token: float = 0.0
    pair: float = 0.0

    def at(self, *, samples: float, length: float = 1, cp: int = 1) -> float:
        """Return the value on one rank, which has `1 / cp` of every sample's positions and attends to all."""
        return self.fixed + samples * (self.sample + length / cp * (self.token + length * self.pair))

    def __add__(self, other: "BatchScaling") -> "BatchScaling":
        return BatchScaling(
            fixed=self.fixed + other.fixed,
            sample=self.sample + other.sample,
            token=self.token + other.token,
            pair=self.pair + other.pair,
        )

    def times(self, factor: float) -> "BatchScaling":
        """Return a copy with every coefficient multiplied by `factor`."""
        return BatchScaling(
            fixed=factor * self.fixed, sample=factor * self.sample, token=factor * self.token, pair=factor * self.pair
        )


NOTHING = BatchScaling()


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """The bytes that a part holds on a rank.

    Over tp, the fraction `cut` is divided among the ranks and `whole` is on each; the two need not add up to 1. With
    sequence parallelism, `sequence_cut` and `sequence_whole` apply instead.
    """

    amount: BatchScaling = NOTHING
    whole: float = 0.0
    cut: float = 1.0
    sequence_whole: float = 0.0
    sequence_cut: float = 1.0

    def at(self, *, samples: float, length: float, cp: int, tp: int, sequence: bool) -> float:
        """Return the bytes on one rank."""
        every = max(0.0, self.amount.at(samples=samples, length=length, cp=cp))
        whole, cut = (self.sequence_whole, self.sequence_cut) if sequence else (self.whole, self.cut)
        return every if tp == 1 else every * max(0.0, whole + cut / tp)


@dataclass(frozen=True, kw_only=True)
class RecomputeProfile:
    """The measured bytes of a part under one `remat`: `kept` from forward to backward, and transient (`moment`)."""

    kept: ActivationBytes
    moment: ActivationBytes


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """A part of the model that is never divided among stages: the part before the blocks, a block, or the part after.

    Parameters are numbers of elements: `whole_parameters` are on every tp rank, `split_parameters` are divided among
    them, `expert_parameters` among the ep ranks; `frozen_parameters` of all of these have no gradient, and
    `lookup_parameters` are embedding tables that take part in no matmul. Amounts are those of one microbatch: FLOPs (a
    multiply-add is two) and bytes of one forward, undivided by tp. `masked_flops` are those of the pairs that a causal
    mask keeps out of `attention_flops`.

    `saved_bytes` are kept for backward on each tp rank, `split_saved_bytes` are divided among them;
    `attention_saved_bytes` are the part of both that fused attention does not keep. `output_bytes` go to the next part.
    `moved_bytes` is what everything but matmuls reads and writes, `fused_bytes` what remains of it if a compiler fuses
    operations. `peak_bytes` is the most that forward or backward needs for a moment, in addition to what is saved.
    `tp_bytes` are all-reduced over tp, in `tp_calls`, as much again in backward; `ep_bytes` are exchanged over ep,
    there and back; `expert_flops` are those of `matmul_flops` in experts. `cp_bytes` are keys and values, which pass
    round a ring over cp. `selective_saved_bytes` are what `remat=selective` keeps in addition to the input, undivided.
    `large_parameters` are the elements of tensors above 16 MiB, which are sent without a bucket: set only if `tensors`,
    the elements of each, are unknown. `tp_parameters` are the elements per rank for measured sizes of tp, since not all
    of `split_parameters` may divide. `ways` are measurements of its memory, by `remat`: they replace the saved bytes
    and the peak stated here.
    """

    name: str
    whole_parameters: int = 0
    split_parameters: int = 0
    expert_parameters: int = 0
    frozen_parameters: int = 0
    lookup_parameters: int = 0
    buffer_bytes: int = 0
    matmul_flops: BatchScaling = NOTHING
    attention_flops: BatchScaling = NOTHING
    masked_flops: BatchScaling = NOTHING
    moved_bytes: BatchScaling = NOTHING
    fused_bytes: BatchScaling = NOTHING
    saved_bytes: BatchScaling = NOTHING
    split_saved_bytes: BatchScaling = NOTHING
    attention_saved_bytes: BatchScaling = NOTHING
    output_bytes: BatchScaling = NOTHING
    peak_bytes: BatchScaling = NOTHING
    tp_bytes: BatchScaling = NOTHING
    tp_calls: int = 0
    ep_bytes: BatchScaling = NOTHING
    expert_flops: BatchScaling = NOTHING
    cp_bytes: BatchScaling = NOTHING
    selective_saved_bytes: BatchScaling = NOTHING
    large_parameters: int = 0
    tensors: tuple[int, ...] = ()
    tp_parameters: tuple[tuple[int, int], ...] = ()
    ways: Mapping[str, RecomputeProfile] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        """The number of elements, undivided."""
        return self.whole_parameters + self.split_parameters + self.expert_parameters

    def held_parameters(self, *, tp: int, ep: int) -> float:
        """Return the elements on one of `tp` × `ep` ranks, without experts that ep divides."""
        for size, held in self.tp_parameters:
            if size == tp and ep == 1:
                return held
        return self.whole_parameters + (self.split_parameters + (self.expert_parameters if ep == 1 else 0)) / tp

    @property
    def flops(self) -> BatchScaling:
        """The FLOPs of matmuls and attention in one forward."""
        return self.matmul_flops + self.attention_flops


@dataclass(frozen=True, kw_only=True)
class OptimizerFootprint:
    """The optimizer's memory in bytes per trainable element: its state, and temporaries of a step.

    `moment_bytes` are the temporaries. `whole_tensors`: its rule needs whole tensors.
    """

    name: str
    state_bytes: float
    moment_bytes: float = 0.0
    whole_tensors: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model and how it is trained, as the planner sees it.

    `blocks` are the chain that may be cut into stages; `tied` are elements of `last` that are shared with `first`.
    `tp_sizes`, `cp_sizes`, `ep_sizes` are the sizes that the model can have besides 1; `refused` says of an axis or an
    option why the model cannot have it. The amounts hold for `precision`; with `compiles`, blocks are compiled.
    """

    name: str
    first: LayerProfile
    blocks: tuple[LayerProfile, ...]
    last: LayerProfile
    optimizer: OptimizerFootprint
    global_batch_size: int
    length: int = 1
    tied: int = 0
    precision: str = "fp32"
    element_bytes: int = 4
    compiles: bool = False
    tp_sizes: tuple[int, ...] = ()
    cp_sizes: tuple[int, ...] = ()
    ep_sizes: tuple[int, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def parts(self) -> Iterator[LayerProfile]:
        """The parts in the order of the forward."""
        yield self.first
        yield from self.blocks
        yield self.last

    @property
    def parameters(self) -> int:
        """The number of elements, tied ones once."""
        return sum(part.parameters for part in self.parts) - self.tied

    def as_json(self) -> dict[str, Any]:
        """Return its fields, for plan.json; `read_facts` reads them back."""
        return asdict(self)


def read_facts(found: Mapping[str, Any]) -> ModelProfile:
    """Return the profile that `ModelProfile.as_json` wrote.

    Raises:
        UsageError: a value is missing or has the wrong type.
    """
    return as_written(found, ModelProfile)
