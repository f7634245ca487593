"""What is known of a model, in numbers: `measured_planning/profile` finds them, the planner reads nothing else."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.config.from_json import as_written


@dataclass(frozen=True, kw_only=True)
class BatchScaling:
    """A number that follows the microbatch: `samples`, each of `length` positions.

    `pair` is of each pair of positions of a sample, as attention's scores are. What has no length has all in `sample`.
    """

    fixed: float = 0.0
    sample: float = 0.0
    token: float = 0.0
    pair: float = 0.0

    def at(self, *, samples: float, length: float = 1, cp: int = 1) -> float:
        """On one rank, where each has `1 / cp` of every sample's positions and sees all of them."""
        return self.fixed + samples * (self.sample + length / cp * (self.token + length * self.pair))

    def __add__(self, other: "BatchScaling") -> "BatchScaling":
        return BatchScaling(
            fixed=self.fixed + other.fixed,
            sample=self.sample + other.sample,
            token=self.token + other.token,
            pair=self.pair + other.pair,
        )

    def times(self, factor: float) -> "BatchScaling":
        """All of it, so many times."""
        return BatchScaling(
            fixed=factor * self.fixed, sample=factor * self.sample, token=factor * self.token, pair=factor * self.pair
        )


NOTHING = BatchScaling()


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """Bytes that a part holds on a rank. Over tp `cut` of it is divided among the ranks and `whole` is on each, as
    parts of 1 that need not add up to it; where the sequence is split, `sequence_cut` and `sequence_whole`."""

    amount: BatchScaling = NOTHING
    whole: float = 0.0
    cut: float = 1.0
    sequence_whole: float = 0.0
    sequence_cut: float = 1.0

    def at(self, *, samples: float, length: float, cp: int, tp: int, sequence: bool) -> float:
        """On one rank."""
        every = max(0.0, self.amount.at(samples=samples, length=length, cp=cp))
        whole, cut = (self.sequence_whole, self.sequence_cut) if sequence else (self.whole, self.cut)
        return every if tp == 1 else every * max(0.0, whole + cut / tp)


@dataclass(frozen=True, kw_only=True)
class RecomputeProfile:
    """What was seen of a part under one `remat`: `kept` from forward to backward, and beside it for a `moment`."""

    kept: ActivationBytes
    moment: ActivationBytes


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """A piece of the model that is never cut into stages: what stands before the blocks, a block, or what follows.

    Parameters are numbers of elements: `whole_parameters` are on every tp rank, `split_parameters` are divided among
    them, `expert_parameters` among the ep ranks; `frozen_parameters` of all of these have no gradient, and
    `lookup_parameters` are tables that are looked up in and take part in no product. Amounts are of one microbatch:
    FLOPs (a multiply-add is two) and bytes of one forward, undivided by tp. `masked_flops` are those of the pairs that
    a causal mask keeps out of `attention_flops`.

    `saved_bytes` are kept for backward on each tp rank, `split_saved_bytes` divided among them; `attention_saved_bytes`
    are those of both that fused attention keeps nothing of. `output_bytes` go to the next part. `moved_bytes` is what
    everything but products reads and writes, `fused_bytes` what is left of it where a compiler joins operations.
    `peak_bytes` is the most that forward or backward needs for a moment, beside what is saved. `tp_bytes` are
    all-reduced over tp, in `tp_calls`, as much again in backward; `ep_bytes` are exchanged over ep, there and back;
    `expert_flops` are those of `matmul_flops` that experts do. `cp_bytes` are keys and values, which go round a ring
    over cp. `selective_saved_bytes` are what `remat=selective` keeps beside the input, undivided. `large_parameters`
    are the elements of tensors above 16 MiB, which travel without a buffer: counted here only where `tensors`, the
    elements of each, are not known. `tp_parameters` are a rank's for sizes of tp that were seen: not all of
    `split_parameters` may divide. `ways` are what was seen of its memory, by `remat`: they stand for what is said here
    of saved bytes and of the peak.
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
        """Elements, undivided."""
        return self.whole_parameters + self.split_parameters + self.expert_parameters

    def held_parameters(self, *, tp: int, ep: int) -> float:
        """Elements on one of `tp` × `ep` ranks, but for experts that are apart."""
        for size, held in self.tp_parameters:
            if size == tp and ep == 1:
                return held
        return self.whole_parameters + (self.split_parameters + (self.expert_parameters if ep == 1 else 0)) / tp

    @property
    def flops(self) -> BatchScaling:
        """Of products and of attention, of one forward."""
        return self.matmul_flops + self.attention_flops


@dataclass(frozen=True, kw_only=True)
class OptimizerFootprint:
    """What an optimizer keeps and needs, in bytes for each trainable element.

    `moment_bytes` is what a step needs for a moment. `whole_tensors`: its rule looks at whole tensors.
    """

    name: str
    state_bytes: float
    moment_bytes: float = 0.0
    whole_tensors: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """A model and how it is trained, for the planner.

    `blocks` are the chain that may be cut into stages; `tied` are elements of `last` that are those of `first` again.
    `tp_sizes`, `cp_sizes`, `ep_sizes` are the sizes that the model can have beside 1; `refused` says of an axis or of
    an option why the model can't have it. `precision` is what the amounts hold for; where it `compiles`, blocks do.
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
        """In the order of the forward."""
        yield self.first
        yield from self.blocks
        yield self.last

    @property
    def parameters(self) -> int:
        """Elements, each once."""
        return sum(part.parameters for part in self.parts) - self.tied

    def as_json(self) -> dict[str, Any]:
        """For plan.json; `read_facts` reads it back."""
        return asdict(self)


def read_facts(found: Mapping[str, Any]) -> ModelProfile:
    """What `as_json` wrote.

    Raises:
        UsageError: something is missing or is of another kind.
    """
    return as_written(found, ModelProfile)
