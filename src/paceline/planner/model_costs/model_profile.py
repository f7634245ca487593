"""Define the profile of a model: all that the planner needs to know. `measured_planning/profile` measures it."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.config.from_json import convert_json


@dataclass(frozen=True, kw_only=True)
class BatchScaling:
    """The coefficients of an amount that depends on the microbatch. Data without a length uses `fixed` and `sample`."""

    fixed: float = 0.0
    sample: float = 0.0
    """The amount per sample."""
    token: float = 0.0
    """The amount per position of a sample."""
    pair: float = 0.0
    """The amount per pair of positions of a sample, as for attention scores."""

    def evaluate(self, *, samples: float, length: float = 1, cp: int = 1) -> float:
        """Return the amount on one rank, for a microbatch of `samples` with `length` positions each.

        The rank has `1 / cp` of the positions of every sample; each of these attends to all positions of the sample.
        """
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
    """The bytes that a part holds on a rank. The fractions apply with tp; their sum may differ from 1."""

    amount: BatchScaling = ZERO
    """The bytes without tp."""
    whole: float = 0.0
    """The fraction that every tp rank holds."""
    cut: float = 1.0
    """The fraction that is divided among the tp ranks."""
    sequence_whole: float = 0.0
    """The value of `whole` with sequence parallelism."""
    sequence_cut: float = 1.0
    """The value of `cut` with sequence parallelism."""

    def evaluate(self, *, samples: float, length: float, cp: int, tp: int, sequence: bool) -> float:
        """Return the bytes on one rank; `sequence` tells whether sequence parallelism is on."""
        total = max(0.0, self.amount.evaluate(samples=samples, length=length, cp=cp))
        whole, cut = (self.sequence_whole, self.sequence_cut) if sequence else (self.whole, self.cut)
        return total if tp == 1 else total * max(0.0, whole + cut / tp)


@dataclass(frozen=True, kw_only=True)
class RecomputeProfile:
    """The measured bytes of a part under one value of `remat`."""

    kept: ActivationBytes
    """The bytes saved for backward."""
    moment: ActivationBytes
    """The transient bytes of forward or backward, recomputation included."""


@dataclass(frozen=True, kw_only=True)
class LayerProfile:
    """A part of the model that no pipeline divides: the part before the blocks, a block, or the part after them.

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
    """The elements among all of the above that have no gradient."""
    lookup_parameters: int = 0
    """The elements of embedding tables that take part in no matmul."""
    buffer_bytes: int = 0
    """The bytes of the module's buffers."""
    matmul_flops: BatchScaling = ZERO
    """The FLOPs of all matmuls that are not part of `attention_flops`."""
    attention_flops: BatchScaling = ZERO
    """The FLOPs of attention scores and of their products with the values, without masked pairs of positions."""
    masked_flops: BatchScaling = ZERO
    """The FLOPs of the pairs of positions that a causal mask excludes; they are not part of `attention_flops`."""
    moved_bytes: BatchScaling = ZERO
    """The bytes that all operations except matmuls read and write."""
    fused_bytes: BatchScaling = ZERO
    """The value of `moved_bytes` if a compiler fuses operations."""
    saved_bytes: BatchScaling = ZERO
    """The bytes saved for backward that every tp rank holds in full."""
    split_saved_bytes: BatchScaling = ZERO
    """The bytes saved for backward that are divided among the tp ranks."""
    attention_saved_bytes: BatchScaling = ZERO
    """The bytes among the saved ones that fused attention does not save."""
    output_bytes: BatchScaling = ZERO
    """The bytes that go to the next part."""
    peak_bytes: BatchScaling = ZERO
    """The transient bytes that forward or backward needs in addition to the saved ones."""
    tp_bytes: BatchScaling = ZERO
    """The bytes that forward all-reduces over tp; backward all-reduces as many."""
    tp_calls: int = 0
    """The number of all-reduces over tp in forward."""
    ep_bytes: BatchScaling = ZERO
    """The bytes that forward exchanges over ep, to the experts and back; backward exchanges as many."""
    expert_flops: BatchScaling = ZERO
    """The part of `matmul_flops` that is in experts."""
    cp_bytes: BatchScaling = ZERO
    """The bytes of keys and values, which a ring of the cp ranks exchanges."""
    selective_saved_bytes: BatchScaling = ZERO
    """The bytes that `remat=selective` saves in addition to the input, before tp divides them."""
    large_parameters: int = 0
    """The elements of tensors above 16 MiB, which are sent without a bucket. It is set only if `tensors` is empty."""
    tensors: tuple[int, ...] = ()
    """The elements of each tensor; empty if they are unknown."""
    tp_parameters: tuple[tuple[int, int], ...] = ()
    """Pairs of (tp size, elements per rank). They are measured, because tp may divide only some `split_parameters`."""
    ways: Mapping[str, RecomputeProfile] = field(default_factory=dict)
    """The measured memory for each `remat`. If it is not empty, it replaces the saved bytes and the peak."""

    @property
    def parameters(self) -> int:
        """The number of elements, before any axis divides them."""
        return self.whole_parameters + self.split_parameters + self.expert_parameters

    def rank_parameters(self, *, tp: int, ep: int) -> float:
        """Return the elements on one of `tp` × `ep` ranks; experts count only if `ep` is 1."""
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
    """The memory that an optimizer needs."""

    name: str
    state_bytes: float
    """The bytes of optimizer state per trainable element."""
    moment_bytes: float = 0.0
    """The bytes of temporaries during the update, per trainable element; not the bytes of an Adam moment."""
    whole_tensors: bool = False
    """True if the update needs full tensors, not shards."""


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """The costs of a model and of its training, as the planner needs them. The field names are keys of plan.json."""

    name: str
    first: LayerProfile
    """The part before the blocks."""
    blocks: tuple[LayerProfile, ...]
    """The blocks. A pipeline may be cut between two of them."""
    last: LayerProfile
    """The part after the blocks."""
    optimizer: OptimizerFootprint
    global_batch_size: int
    """The samples of one optimizer step."""
    length: int = 1
    """The positions of a sample; 1 if samples have no length."""
    tied: int = 0
    """The elements of `last` that are shared with `first`."""
    precision: str = "fp32"
    """The precision of matmuls, for which all amounts of the profile were measured."""
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
    """The reason for each axis, option, layout or family that the model does not support; see `option_keys`."""

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
