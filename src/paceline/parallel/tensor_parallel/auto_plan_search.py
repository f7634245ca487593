"""Search for the weights that can be sharded, by running the model as rank 0 of a group without other ranks.

Every matmul with a weight is tried as a column split; the sharding then propagates through the model's own forward.
If it reaches another matmul, that weight becomes the row split. If something needs the whole tensor, the weight that
produced it stays whole, or is tried again as the fused projection that it turned out to be.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from paceline.parallel.tensor_parallel.plan_dry_run import DryWire, shown_whole
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor, name_of
from paceline.parallel.tensor_parallel.sharding import DimSharding, IncompatibleReshape, even_cut
from paceline.torch_internals.function_signatures import SIGNATURES, read_call
from paceline.torch_internals.pytree import tensor_leaves

TURNS = (".T", ".mT", "t")
LOSSES = ("cross_entropy", "nll_loss", "argmax")
PRODUCTS = {  # names of the parameters for input, weight and bias
    "linear": ("input", "weight", "bias"),
    "addmm": ("mat1", "mat2", "input"),
    "matmul": ("input", "other"),
    "__matmul__": ("input", "other"),
    "mm": ("input", "mat2"),
}


@dataclass(kw_only=True)
class WeightDecision:
    """The decision for one weight: the sharded dimension and its section borders, or why it stays whole.

    `suggested`: the borders are copied from the same weight of another block; `alone`: they did not fit this weight.
    """

    dim: int | None = None
    kind: str = ""
    size: int = 0
    borders: frozenset[int] = frozenset()
    heads: int | None = None
    why: str = ""
    bias: str | None = None
    suggested: bool = False
    alone: bool = False

    def sections(self, size: int) -> tuple[int, ...]:
        """Return the sizes between the borders."""
        ends = [0, *sorted(b for b in self.borders if 0 < b < size), size]
        return tuple(b - a for a, b in pairwise(ends))


class PlanSearchMode(TorchFunctionMode):
    """A run of the model that decides each weight at its first use, and shows decided weights as sharded."""

    def __init__(self, *, names: dict[int, str], found: dict[str, WeightDecision], ranks: int) -> None:
        super().__init__()
        self.wire = DryWire(size=ranks)
        self.embeddings: dict[str, int] = {}
        self.consumed: dict[str, set[str]] = {}
        self._names, self._found, self._ranks = names, found, ranks
        self._shown: dict[str, ShardPropagatingTensor] = {}
        self._turned: dict[int, tuple[Tensor, nn.Parameter]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Decide the weights of this call, show them as sharded, and call the function."""
        name, kwargs = name_of(func), kwargs or {}
        given = (read_call(name, args, kwargs) if name in SIGNATURES else None) or {}
        first: Any = args[0] if args else given.get("input")
        if given and name in PRODUCTS:
            self._product(*(given[place] for place in PRODUCTS[name]), turned=name != "linear")
        if name in TURNS and self._name(first) and first.dim() == 2:
            made = func(*args, **kwargs)
            self._turned[id(made)] = (made, first)
            return made
        weight = self._name(given.get("weight"))
        if name == "embedding" and weight is not None:
            self.embeddings[weight] = len(given["weight"])
        if name in LOSSES and isinstance(given.get("input"), ShardPropagatingTensor):
            self.reached(given["input"], "output")
        return func(*(self._show(a) for a in args), **{k: self._show(a) for k, a in kwargs.items()})

    def reached(self, value: ShardPropagatingTensor, what: str) -> None:
        """Record that a value which these weights produced reaches a consumer that may be sharded."""
        for origin in value.origins:
            self.consumed.setdefault(origin, set()).add(what)

    def _name(self, value: Any) -> str | None:
        return self._names.get(id(value)) if isinstance(value, nn.Parameter) else None

    def _product(self, x: Any, weight: Any, bias: Any = None, *, turned: bool) -> None:
        if id(weight) in self._turned:
            weight, turned = self._turned[id(weight)][1], not turned
        name = self._name(weight)
        if name is None or weight is None or weight.dim() != 2 or self._name(x) is not None:
            return
        row = None if name in self.embeddings else _cut_of_row(x)
        if row is not None and isinstance(x, ShardPropagatingTensor):
            self.reached(x, "row")
        known = self._found.get(name)
        if known is not None and known.kind:
            return
        found = self._found.setdefault(name, WeightDecision())
        if row is not None:
            found.kind, found.dim = "row", 0 if turned else 1
            found.borders = _borders(row)
            found.bias = None
        elif weight.shape[1 if turned else 0] >= self._ranks and weight.is_floating_point():
            found.kind, found.dim = "column", 1 if turned else 0
            found.size = weight.shape[found.dim]
            self._of_bias(found, bias)
        else:
            found.kind, found.why = "whole", "smaller than the number of ranks"

    def _of_bias(self, found: WeightDecision, bias: Any) -> None:
        found.bias = self._name(bias)
        if found.bias is not None:
            self._found[found.bias] = WeightDecision(kind="column", dim=0, borders=found.borders)

    def _show(self, value: Any) -> Any:
        if id(value) in self._turned:
            shown = self._show(self._turned[id(value)][1])
            return shown.t() if isinstance(shown, ShardPropagatingTensor) else value
        name = self._name(value)
        found = self._found.get(name) if name is not None else None
        if name is None or found is None or found.dim is None:
            return value
        if name not in self._shown:
            size = value.shape[found.dim]
            cut = even_cut(size, ranks=self._ranks, sections=found.sections(size), dim=found.dim)
            origins = (name,) if found.kind == "column" and value.dim() > 1 else ()
            self._shown[name] = shown_whole(value.detach(), cut, self.wire, origins=origins)
        return self._shown[name]


def _cut_of_row(x: Any) -> DimSharding | None:
    return x.cut if isinstance(x, ShardPropagatingTensor) and x.cut.dim == len(x.whole) - 1 else None


def _borders(cut: DimSharding) -> frozenset[int]:
    ends, at = set(), 0
    for fences in cut.sections:
        at += fences[-1]
        ends.add(at)
    return frozenset(ends - {cut.size})


def learn_from_blocked(explorer: PlanSearchMode, found: dict[str, WeightDecision]) -> bool:
    """Update the decisions from what needed a whole tensor, and return whether another run is needed.

    A weight that turns out to be fused changes what follows it; then nothing else is concluded from this run.
    """
    blocked = [
        (found[origin], what, misfit)
        for origins, what, misfit in explorer.wire.events
        for origin in sorted(origins)
        if found[origin].kind == "column"
    ]
    refined = [_refine(known, misfit) for known, _, misfit in blocked]
    left = [] if any(refined) else [_leave_alone(known) for known, _, _ in blocked]
    if any(refined) or any(left):
        return True
    for known, what, misfit in blocked:
        if known.kind == "column":
            known.kind, known.dim, known.borders = "whole", None, frozenset()
            known.heads = None if misfit is None else misfit.heads
            known.why = misfit.what if misfit is not None else what
    return bool(blocked)


def _refine(known: WeightDecision, misfit: IncompatibleReshape | None) -> bool:
    if misfit is None or not misfit.sections:
        return False
    each = known.size // sum(misfit.sections)  # rows of the weight per element of the sliced dimension, e.g. per head
    ends, at = set() if known.suggested else set(known.borders), 0
    for size in misfit.sections[:-1]:
        at += size * each
        ends.add(at)
    if frozenset(ends) == known.borders or len(ends) >= 8:
        return False
    known.borders, known.suggested = frozenset(ends), False
    return True


def _leave_alone(known: WeightDecision) -> bool:
    """Drop borders that were only suggested, for good, and return whether there were any."""
    was = known.suggested
    if was:
        known.borders, known.suggested, known.alone = frozenset(), False, True
    return was


def forget_guesses(found: dict[str, WeightDecision]) -> None:
    """Reset the decisions before another run.

    Kept are weights that stay whole, the vocabulary, and the section borders of fused projections.
    """
    for name, known in list(found.items()):
        if known.kind == "whole" or known.why == "embedding":
            continue
        if known.kind == "row":
            known.borders = frozenset()
        known.kind, known.dim = "", None
        if not (known.borders or known.alone):
            del found[name]


def suggest_for_all_blocks(found: dict[str, WeightDecision], likes: dict[str, tuple[object, ...]]) -> None:
    """Suggest the borders found for one block's fused projection to the same projection of all blocks.

    Call it before another run. `likes` maps names to a key that is equal for like weights. Without it the model would
    be run once per block.
    """
    own = [n for n, known in found.items() if n in likes and not (known.kind or known.suggested or known.alone)]
    shown = {likes[name]: found[name].borders for name in own}
    for name, like in likes.items():
        if name not in found and like in shown:
            found[name] = WeightDecision(borders=shown[like], suggested=True)


def splits_of(value: Any) -> Iterable[ShardPropagatingTensor]:
    """Return every sharded tensor in an output of any structure."""
    return (tensor for tensor in tensor_leaves(value) if isinstance(tensor, ShardPropagatingTensor))
