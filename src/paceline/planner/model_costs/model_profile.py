"""Define the profile of a model: everything that the planner needs to know of a model.

`measured_planning/profile` measures it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.config.from_json import convert_json


@dataclass(frozen=True, kw_only=True)
class BatchScaling:
    """The coefficients of a number that scales with the microbatch: `samples`, each of `length` positions.

    `sample`, `token` and `pair` are per sample, per position, and per pair of positions of a sample (as for attention
    scores). Data without a length only uses `fixed` and `sample`.
    """

    fixed: float = 0.0
    sample: float = 0.0
    token: float = 0.0
    pair: float = 0.0

    def evaluate(self, *, samples: float, length: float = 1, cp: int = 1) -> float:
        """Return the value on one rank, which has `1 / cp` of the positions of a sample and attends to all."""
        return self.fixed + samples * (self.sample + length / cp * (self.token + length * self.pair))

    def __add__(self, other: "BatchScaling") -> "BatchScaling":
        return BatchScaling(
            fixed=self.fixed + other.fixed,
            sample=self.sample + other.sample,
            token=self.token + other.token,
            pair=self.pair + other.pair,
        )

    def scaled_by(self, factor: float) -> "BatchScaling":
        """Return a copy with every coefficient multiplied by `factor`."""
        return BatchScaling(
            fixed=factor * self.fixed, sample=factor * self.sample, token=factor * self.token, pair=factor * self.pair
        )


ZERO = BatchScaling()


@dataclass(frozen=True, kw_only=True)
class ActivationBytes:
    """The bytes that a part of the model holds on a rank.

    With tp, the fraction `cut` is divided among the ranks and the fraction `whole` is on each; their sum may differ
    from 1. With sequence parallelism, `sequence_cut` and `sequence_whole` apply instead.
    """

    amount: BatchScaling = ZERO
    whole: float = 0.0
    cut: float = 1.0
    sequence_whole: float = 0.0
    sequence_cut: float = 1.0

    def evaluate(self, *, samples: float, length: float, cp: int, tp: int, sequence: bool) -> float:
        """Return the bytes on one rank."""
        total = max(0.0, self.amount.evaluate(samples=samples, length=length, cp=cp))
        whole, cut = (self.sequence_whole, self.sequence_cut) if sequence else (self.whole, self.cut)
        return total if tp == 1 else total * max(0.0, whole + cut / tp)


@dataclass(frozen=True, kw_only=True)
class RecomputeProfile:
    """The measured bytes of a part under one `remat`: `kept` until backward, `moment` only transiently."""

    kept: ActivationBytes
    moment: ActivationBytes


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """A part of the model that pipelines do not divide: the part before the blocks, a block, or the part after them.

    Numbers of parameters are numbers of elements. FLOPs (a multiply-add is two) and bytes are those of one forward of
    one microbatch, before tp divides them. The field names are keys of plan.json.
    """

    name: str
    whole_parameters: int = 0
    """The elements that every tp rank holds in full."""
    split_parameters: int = 0
    """The elements that are divided among the tp ranks."""
    expert_parameters: int = 0
    """The elements of experts, which are divided among the ep ranks."""
    frozen_parameters: int = 0
    """The elements, of all of these, that have no gradient."""
    lookup_parameters: int = 0
    """The elements of embedding tables, which take part in no matmul."""
    buffer_bytes: int = 0
    matmul_flops: BatchScaling = ZERO
    attention_flops: BatchScaling = ZERO
    """The FLOPs of attention scores and of their products with the values, without masked pairs of positions."""
    masked_flops: BatchScaling = ZERO
    """The FLOPs of the pairs of positions that a causal mask excludes; they are not part of `attention_flops`."""
    moved_bytes: BatchScaling = ZERO
    """The bytes that all operations except matmuls read and write."""
    fused_bytes: BatchScaling = ZERO
    """The same if a compiler fuses operations."""
    saved_bytes: BatchScaling = ZERO
    """The bytes that each tp rank saves for backward in full."""
    split_saved_bytes: BatchScaling = ZERO
    """The bytes saved for backward that are divided among the tp ranks."""
    attention_saved_bytes: BatchScaling = ZERO
    """The part of all saved bytes that fused attention does not save."""
    output_bytes: BatchScaling = ZERO
    """The bytes that go to the next part."""
    peak_bytes: BatchScaling = ZERO
    """The transient bytes that forward or backward needs in addition to the saved ones."""
    tp_bytes: BatchScaling = ZERO
    """The bytes that forward all-reduces over tp, in `tp_calls` calls; backward all-reduces as many."""
    tp_calls: int = 0
    ep_bytes: BatchScaling = ZERO
    """The bytes that are exchanged over ep, and as many back."""
    expert_flops: BatchScaling = ZERO
    """The part of `matmul_flops` that is in experts."""
    cp_bytes: BatchScaling = ZERO
    """The bytes of keys and values, which a ring over cp exchanges."""
    selective_saved_bytes: BatchScaling = ZERO
    """The bytes that `remat=selective` saves in addition to the input, before tp divides them."""
    large_parameters: int = 0
    """The elements of tensors above 16 MiB, which are sent without a bucket. It is set only if `tensors` is empty."""
    tensors: tuple[int, ...] = ()
    """The elements of each tensor; empty if they are unknown."""
    tp_parameters: tuple[tuple[int, int], ...] = ()
    """Pairs of a tp size and the measured elements per rank. Tp may not divide all of `split_parameters`."""
    ways: Mapping[str, RecomputeProfile] = field(default_factory=dict)
    """The measured memory for each `remat`. If it is not empty, it replaces the saved bytes and the peak."""

    @property
    def parameters(self) -> int:
        """The number of elements, undivided."""
        return self.whole_parameters + self.split_parameters + self.expert_parameters

    def rank_parameters(self, *, tp: int, ep: int) -> float:
        """Return the elements on one of `tp` × `ep` ranks, without the experts if ep divides them."""
        for size, elements in self.tp_parameters:
            if size == tp and ep == 1:
                return elements
        return self.whole_parameters + (self.split_parameters + (self.expert_parameters if ep == 1 else 0)) / tp

    @property
    def flops(self) -> BatchScaling:
        """The FLOPs of matmuls and attention in one forward."""
        return self.matmul_flops + self.attention_flops


@dataclass(frozen=True, kw_only=True)
class OptimizerFootprint:
    """The optimizer's memory in bytes per trainable element: its state, and the temporaries of a step (`moment_bytes`).

    If `whole_tensors`, the update needs full tensors instead of shards.
    """

    name: str
    state_bytes: float
    moment_bytes: float = 0.0
    whole_tensors: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The costs of a model and of its training, as the planner needs them. The field names are keys of plan.json."""

    name: str
    first: LayerProfile
    blocks: tuple[LayerProfile, ...]
    """The chain that may be cut into stages."""
    last: LayerProfile
    optimizer: OptimizerFootprint
    global_batch_size: int
    length: int = 1
    """The positions of a sample; 1 if samples have no length."""
    tied: int = 0
    """The elements of `last` that are shared with `first`."""
    precision: str = "fp32"
    """The precision of matmuls for which the amounts were measured."""
    element_bytes: int = 4
    """The bytes of an element of a parameter."""
    compiles: bool = False
    """Whether the blocks are compiled."""
    tp_sizes: tuple[int, ...] = ()
    """The supported sizes of tp, besides 1."""
    cp_sizes: tuple[int, ...] = ()
    """The supported sizes of cp, besides 1."""
    ep_sizes: tuple[int, ...] = ()
    """The supported sizes of ep, besides 1."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """The reason for each axis, option or layout that the model does not support."""

    @property
    def parts(self) -> Iterator[LayerProfile]:
        """The parts in the order of the forward."""
        yield self.first
        yield from self.blocks
        yield self.last

    @property
    def parameters(self) -> int:
        """The number of elements; tied elements count once."""
        return sum(part.parameters for part in self.parts) - self.tied

    def as_json(self) -> dict[str, Any]:
        """Return the fields, for plan.json; `model_profile_from_json` reads them."""
        return asdict(self)


def model_profile_from_json(stored: Mapping[str, Any]) -> ModelProfile:
    """Return the profile that `ModelProfile.as_json` wrote.

    Raises:
        UsageError: a value is missing or has the wrong type.
    """
    return convert_json(stored, ModelProfile, part='"facts"')
