"""Search for the weights that can be sharded, by running the model as rank 0 of a group that has no other ranks.

The weight of a matmul is first sharded column-wise, and the sharding of its output propagates through the model's
forward. If the input of another matmul is sharded, the weight of that matmul is sharded row-wise. If a function needs
the full tensor, the weight that produced the tensor is either not sharded, or the next run tries to shard it as a fused
projection.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from paceline.parallel.tensor_parallel.plan_dry_run import DryRunGroup, wrap_full_tensor
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor, function_name
from paceline.parallel.tensor_parallel.sharding import DimSharding, IncompatibleReshape, shard_evenly
from paceline.torch_internals.function_signatures import SIGNATURES, bind_arguments
from paceline.torch_internals.pytree import tensor_leaves

TRANSPOSES = (".T", ".mT", "t")
LOSSES = ("cross_entropy", "nll_loss", "argmax")
MATMUL_PARAMETERS = {  # names of the parameters for input, weight and bias
    "linear": ("input", "weight", "bias"),
    "addmm": ("mat1", "mat2", "input"),
    "matmul": ("input", "other"),
    "__matmul__": ("input", "other"),
    "mm": ("input", "mat2"),
}


@dataclass(kw_only=True)
class WeightDecision:
    """The decision for one weight or bias.

    `kind` is "column", "row", "whole" (not sharded), or "" before the decision. `dim` is the sharded dimension, `size`
    its full size, and `borders` the positions between its sections. `reason` says why the weight is not sharded; for a
    weight that is sharded along the vocabulary, it is "head" or "embedding". `heads` is the number of heads that an
    incompatible reshape suggests. `bias` is the name of the bias that is sharded with the weight. `is_suggested`: the
    borders come from the same weight in another block. `rejects_suggestions`: borders from another block did not fit
    this weight.
    """

    dim: int | None = None
    kind: str = ""
    size: int = 0
    borders: frozenset[int] = frozenset()
    heads: int | None = None
    reason: str = ""
    bias: str | None = None
    is_suggested: bool = False
    rejects_suggestions: bool = False

    def sections(self, size: int) -> tuple[int, ...]:
        """Return the sizes of the sections between the borders."""
        ends = [0, *sorted(b for b in self.borders if 0 < b < size), size]
        return tuple(b - a for a, b in pairwise(ends))


class PlanSearchMode(TorchFunctionMode):
    """A function mode that decides how to shard a weight at its first use, and passes sharded weights to functions.

    `names` maps the ids of parameters to their names. `embeddings` maps the names of embedding weights to their numbers
    of rows. `consumers` maps the name of a weight to the kinds of functions that read its outputs: "row" (a
    row-parallel matmul) or "output" (the loss, or the model's output).
    """

    def __init__(self, *, names: dict[int, str], decisions: dict[str, WeightDecision], ranks: int) -> None:
        super().__init__()
        self.group = DryRunGroup(size=ranks)
        self.embeddings: dict[str, int] = {}
        self.consumers: dict[str, set[str]] = {}
        self._names, self._decisions, self._ranks = names, decisions, ranks
        self._sharded_tensors: dict[str, ShardPropagatingTensor] = {}
        self._transposed: dict[int, tuple[Tensor, nn.Parameter]] = {}  # by id of the transposed tensor, with its source

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Decide the weights of this call, and call the function with sharded weights."""
        name, kwargs = function_name(func), kwargs or {}
        arguments = (bind_arguments(name, args, kwargs) if name in SIGNATURES else None) or {}
        first: Any = args[0] if args else arguments.get("input")
        if arguments and name in MATMUL_PARAMETERS:
            self._decide_matmul(
                *(arguments[parameter] for parameter in MATMUL_PARAMETERS[name]), is_transposed=name != "linear"
            )
        if name in TRANSPOSES and self._parameter_name(first) and first.dim() == 2:
            transposed = func(*args, **kwargs)
            self._transposed[id(transposed)] = (transposed, first)
            return transposed
        weight = self._parameter_name(arguments.get("weight"))
        if name == "embedding" and weight is not None:
            self.embeddings[weight] = len(arguments["weight"])
        if name in LOSSES and isinstance(arguments.get("input"), ShardPropagatingTensor):
            self.record_consumer(arguments["input"], "output")
        return func(
            *(self._replace_parameter(a) for a in args), **{k: self._replace_parameter(a) for k, a in kwargs.items()}
        )

    def record_consumer(self, value: ShardPropagatingTensor, consumer: str) -> None:
        """Record the consumer of a sharded value, for the weights that produced the value."""
        for origin in value.origins:
            self.consumers.setdefault(origin, set()).add(consumer)

    def _parameter_name(self, value: Any) -> str | None:
        return self._names.get(id(value)) if isinstance(value, nn.Parameter) else None

    def _decide_matmul(self, x: Any, weight: Any, bias: Any = None, *, is_transposed: bool) -> None:
        """Decide how to shard the weight of a matmul with input `x`.

        `is_transposed` is True if the weight has the shape (inputs, outputs).
        """
        if id(weight) in self._transposed:
            weight, is_transposed = self._transposed[id(weight)][1], not is_transposed
        name = self._parameter_name(weight)
        if name is None or weight is None or weight.dim() != 2 or self._parameter_name(x) is not None:
            return
        row_sharding = None if name in self.embeddings else _row_sharding(x)
        if row_sharding is not None and isinstance(x, ShardPropagatingTensor):
            self.record_consumer(x, "row")
        decided = self._decisions.get(name)
        if decided is not None and decided.kind:
            return
        decision = self._decisions.setdefault(name, WeightDecision())
        if row_sharding is not None:
            decision.kind, decision.dim = "row", 0 if is_transposed else 1
            decision.borders = _borders(row_sharding)
            decision.bias = None
        elif weight.shape[1 if is_transposed else 0] >= self._ranks and weight.is_floating_point():
            decision.kind, decision.dim = "column", 1 if is_transposed else 0
            decision.size = weight.shape[decision.dim]
            self._decide_bias(decision, bias)
        else:
            decision.kind, decision.reason = "whole", "smaller than the number of ranks"

    def _decide_bias(self, decision: WeightDecision, bias: Any) -> None:
        decision.bias = self._parameter_name(bias)
        if decision.bias is not None:
            self._decisions[decision.bias] = WeightDecision(kind="column", dim=0, borders=decision.borders)

    def _replace_parameter(self, value: Any) -> Any:
        """Return the sharded tensor of a parameter that is to be sharded; return other values unchanged."""
        if id(value) in self._transposed:
            sharded = self._replace_parameter(self._transposed[id(value)][1])
            return sharded.t() if isinstance(sharded, ShardPropagatingTensor) else value
        name = self._parameter_name(value)
        decision = self._decisions.get(name) if name is not None else None
        if name is None or decision is None or decision.dim is None:
            return value
        if name not in self._sharded_tensors:
            size = value.shape[decision.dim]
            sharding = shard_evenly(size, ranks=self._ranks, sections=decision.sections(size), dim=decision.dim)
            origins = (name,) if decision.kind == "column" and value.dim() > 1 else ()
            self._sharded_tensors[name] = wrap_full_tensor(value.detach(), sharding, self.group, origins=origins)
        return self._sharded_tensors[name]


def _row_sharding(x: Any) -> DimSharding | None:
    """Return the sharding of a matmul's input if its last dimension is sharded."""
    return x.sharding if isinstance(x, ShardPropagatingTensor) and x.sharding.dim == len(x.full_shape) - 1 else None


def _borders(sharding: DimSharding) -> frozenset[int]:
    """Return the positions between the sections of a sharded dimension."""
    ends, offset = set(), 0
    for bounds in sharding.sections:
        offset += bounds[-1]
        ends.add(offset)
    return frozenset(ends - {sharding.size})


def learn_from_all_gathers(search: PlanSearchMode, decisions: dict[str, WeightDecision]) -> bool:
    """Update the decisions from the recorded all-gathers, and return whether another run is needed.

    If some weights are found to be fused projections, only their borders are updated, because the later all-gathers of
    this run may be consequences of the wrong borders.
    """
    gathered = [
        (decisions[origin], function, incompatible_reshape)
        for origins, function, incompatible_reshape in search.group.all_gathers
        for origin in sorted(origins)
        if decisions[origin].kind == "column"
    ]
    has_new_borders = [_add_borders(decision, incompatible_reshape) for decision, _, incompatible_reshape in gathered]
    if any(has_new_borders):
        return True
    has_dropped = [_drop_suggestion(decision) for decision, _, _ in gathered]
    if any(has_dropped):
        return True
    for decision, function, incompatible_reshape in gathered:
        if decision.kind == "column":
            decision.kind, decision.dim, decision.borders = "whole", None, frozenset()
            decision.heads = None if incompatible_reshape is None else incompatible_reshape.heads
            decision.reason = incompatible_reshape.description if incompatible_reshape is not None else function
    return bool(gathered)


def _add_borders(decision: WeightDecision, incompatible_reshape: IncompatibleReshape | None) -> bool:
    """Add the section borders that an incompatible reshape suggests, and return whether the borders have changed."""
    if incompatible_reshape is None or not incompatible_reshape.sections:
        return False
    # rows of the weight per element of the sliced dimension
    rows_per_element = decision.size // sum(incompatible_reshape.sections)
    ends, offset = set() if decision.is_suggested else set(decision.borders), 0
    for size in incompatible_reshape.sections[:-1]:
        offset += size * rows_per_element
        ends.add(offset)
    if frozenset(ends) == decision.borders or len(ends) >= 8:  # no fused projection has more than 8 sections
        return False
    decision.borders, decision.is_suggested = frozenset(ends), False
    return True


def _drop_suggestion(decision: WeightDecision) -> bool:
    """Drop the borders if they were suggested, and reject later suggestions; return whether they were suggested."""
    was_suggested = decision.is_suggested
    if was_suggested:
        decision.borders, decision.is_suggested, decision.rejects_suggestions = frozenset(), False, True
    return was_suggested


def reset_decisions(decisions: dict[str, WeightDecision]) -> None:
    """Reset the decisions before another run.

    Three kinds of decisions are kept: not to shard a weight, to shard an embedding along the vocabulary, and the
    section borders of fused projections.
    """
    for name, decision in list(decisions.items()):
        if decision.kind == "whole" or decision.reason == "embedding":
            continue
        if decision.kind == "row":
            decision.borders = frozenset()
        decision.kind, decision.dim = "", None
        if not (decision.borders or decision.rejects_suggestions):
            del decisions[name]


def suggest_borders(decisions: dict[str, WeightDecision], similarity_keys: dict[str, tuple[object, ...]]) -> None:
    """Suggest the borders of one block's fused projection for the same projection of all blocks, before another run.

    `similarity_keys` maps names to a key that is equal for corresponding weights of different blocks. Without
    suggestions the search needs one run per block.
    """
    known_borders = {
        similarity_keys[name]: decision.borders
        for name, decision in decisions.items()
        if name in similarity_keys and not (decision.kind or decision.is_suggested or decision.rejects_suggestions)
    }
    for name, key in similarity_keys.items():
        if name not in decisions and key in known_borders:
            decisions[name] = WeightDecision(borders=known_borders[key], is_suggested=True)


def find_sharded_outputs(value: Any) -> Iterable[ShardPropagatingTensor]:
    """Return every sharded tensor in an output of any structure."""
    return (tensor for tensor in tensor_leaves(value) if isinstance(tensor, ShardPropagatingTensor))
