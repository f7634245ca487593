"""Calls of every function that has a tensor rule, in each spelling that its signature allows.

Plain torch is the judge twice: of what is a spelling at all, and of what comes out.
"""

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.errors import LayoutError
from paceline.parallel.tensor_parallel import tensor_parallel as placed
from paceline.parallel.tensor_parallel.collectives import WorldGroup, take_local_shard
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor, function_name
from paceline.parallel.tensor_parallel.sharding import shard_evenly
from paceline.torch_internals.function_signatures import _NUMPY_NAMES, SIGNATURES, Signature
from paceline.torch_internals.private_api import tree_flatten, tree_unflatten
from tests.parallel.tensor_parallel.tensor_parallel_models import run_group

assert placed
SHAPE = (4, 6, 5)
FAR = 1e-12  # of float64: the largest number of terms that a call here adds is 120, so 120 * 2**-53 = 1.3e-14 apart


@dataclass(frozen=True, eq=False)
class Cuttable:
    """A tensor argument; along `dim` it is cut, where that is a number."""

    whole: Tensor
    dim: int | None

    def given(self, wire: WorldGroup | None, *, fused: bool) -> tuple[Tensor, Tensor | None]:
        """What is passed, in one process or as a rank has it, of two sections where it is fused; and the leaf that its
        gradient comes to."""
        leaf = self.whole.clone().requires_grad_() if self.whole.is_floating_point() else None
        value = self.whole.clone() if leaf is None else leaf * 1
        if wire is None or self.dim is None:
            return value, leaf
        size = value.shape[self.dim]
        sections = (size // 3, size - size // 3) if fused and size > 2 else (size,)
        cut = shard_evenly(size, ranks=wire.size, sections=sections, dim=self.dim)
        return ShardPropagatingTensor.from_local(take_local_shard(value, cut, wire).clone(), cut, wire), leaf


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """One call: `function(*args, **kwargs)`, its tensors not yet made."""

    name: str
    words: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, wire: WorldGroup | None, *, fused: bool = False) -> "Ran":
        """Call it and go back; in one process, or on a rank."""
        leaves, shape = tree_flatten((self.args, self.kwargs))
        made = [leaf.given(wire, fused=fused) if isinstance(leaf, Cuttable) else (leaf, None) for leaf in leaves]
        args, kwargs = tree_unflatten([value for value, _ in made], shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = self.function(*args, **kwargs)
            values = [_whole(leaf) for leaf in tree_flatten(list(found) if _is_iterator(found) else found)[0]]
        after = [_whole(value).detach() for value, _ in made if isinstance(value, Tensor)]
        total = sum((v.square().sum() for v in values if _has_gradient(v)), torch.zeros((), dtype=torch.float64))
        if total.requires_grad:
            total.backward()
        return Ran(values=values, after=after, gradients=[leaf.grad for _, leaf in made if leaf is not None])


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a call gave, what it left its tensors as, and their gradients."""

    values: list[Any]
    after: list[Tensor]
    gradients: list[Tensor | None]

    def differs(self, other: "Ran") -> str:
        """Say what is not the same in another run; empty where all is."""
        types = {v.dtype for v in other.values if isinstance(v, Tensor) and v.is_floating_point()} - {torch.float64}
        far = max((8 * torch.finfo(dtype).eps for dtype in types), default=FAR)
        for what in ("values", "after", "gradients"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if len(mine) != len(theirs):
                return f"{len(mine)} {what} for {len(theirs)}"
            for n, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                if not _equal(a, b, far):
                    return f"{what} {n}: {_brief(a)} for {_brief(b)}"
        return ""


def _is_iterator(found: Any) -> bool:
    return hasattr(found, "__next__")


def _has_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.requires_grad


def _whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, ShardPropagatingTensor) else value


def _equal(mine: Any, whole: Any, far: float) -> bool:
    if not isinstance(whole, Tensor):
        return type(mine) is type(whole) and (mine == whole or callable(whole) or mine != mine)
    if not isinstance(mine, Tensor) or mine.dtype != whole.dtype or mine.shape != whole.shape:
        return False
    if not whole.is_floating_point():
        return torch.equal(mine, whole)
    return torch.allclose(mine.double(), whole.double(), rtol=far, atol=far, equal_nan=True)


def _brief(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]


# -- spellings


def spellings(name: str, given: dict[str, Any]) -> Iterator[Spelling]:
    """Every way to write one call: as function, method or operator, by place or by name, by each of its names; some
    that torch does not take."""
    for where, function in _functions(name):
        seen = set()
        for signature in SIGNATURES[name]:
            for args, kwargs in _written(signature, given):
                key = repr([mark(value) for value in (args, sorted(kwargs.items()))])
                made = Spelling(name=name, words=f"{where}.{name}{key}", function=function, args=args, kwargs=kwargs)
                if key not in seen:
                    seen.add(key)
                    yield made


def _functions(name: str) -> list[tuple[str, Callable[..., Any]]]:
    short = name.removeprefix("linalg_")
    places = {"torch": torch, "Tensor": Tensor, "F": F, "linalg": torch.linalg}
    found = [(where, getattr(place, short)) for where, place in places.items() if hasattr(place, short)]
    return [(where, function) for where, function in found if function_name(function) == name]


def _written(signature: Signature, given: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    ordered = list(signature.positional)
    by_name = {parameter.names[0]: parameter for parameter in (*ordered, *signature.keyword_only)}
    if any(name not in by_name for name in given):
        return
    for places in range(len(ordered) + 1):
        placed_ones, args = ordered[:places], list[Any]()
        if any(parameter.names[0] not in given for parameter in placed_ones):
            break
        many = [parameter for parameter in placed_ones if parameter.is_variadic]
        for parameter in placed_ones:
            args.append(given[parameter.names[0]])
        rest = [name for name in given if name not in {p.names[0] for p in placed_ones}]
        keys = [[*by_name[n].names, *(k for k, v in _NUMPY_NAMES.items() if v == n and k != "self")] for n in rest]
        forms = [tuple(args)]
        if many:
            forms = [(*args[:-1], *args[-1]), tuple(args), (*args[:-1], list(args[-1]))]
        for form, chosen in itertools.product(forms, itertools.product(*keys)):
            yield form, dict(zip(chosen, (given[name] for name in rest), strict=True))


def mark(value: Any) -> Any:
    if isinstance(value, Cuttable):
        return "whole" if value.dim is None else f"cut{value.dim}"
    if isinstance(value, tuple | list):
        return [mark(v) for v in value]
    return value


def is_taken(spelling: Spelling) -> bool:
    """Whether torch takes this spelling, and has a gradient for it; one that it refuses is none."""
    try:
        return not any(value is NotImplemented for value in spelling.run(None).values)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return False


# -- the count


@dataclass(kw_only=True)
class Count:
    """What came of all calls."""

    functions: set[str] = field(default_factory=set)
    calls: int = 0
    equal: int = 0
    joined: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"functions {len(self.functions)}, calls {self.calls}, equal {self.equal} (of these {self.joined} by the "
            f"whole), refused {len(self.refused)}, wrong {len(self.wrong)}"
        )

    def add(self, spelling: Spelling, *, ranks: int, fused: bool = False) -> None:
        """Call it in one process and on `ranks` threads."""
        self.functions.add(spelling.name)
        self.calls += 1
        alone = spelling.run(None)
        wires: list[WorldGroup] = []

        def work(wire: WorldGroup) -> Ran:
            wires.append(wire)
            return spelling.run(wire, fused=fused)

        words = f"{spelling.words} on {ranks} ranks{', fused' * fused}"
        try:
            found = run_group(work, ranks=ranks)
        except LayoutError as error:
            self.refused.append(f"{words}: {error.what}")
            return
        except Exception as error:
            self.wrong.append(f"{words}: {type(error).__name__}: {error}")
            return
        told = [apart for ran in found if (apart := ran.differs(alone))]
        if told:
            self.wrong.append(f"{words}: {told[0]}")
            return
        self.equal += 1
        self.joined += any(wire.notes for wire in wires)


def draw(*shape: int) -> Tensor:
    """Values that lie apart, so that no order of terms decides which is the largest."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


__all__ = ["SHAPE", "Count", "Cuttable", "Spelling", "draw", "function_name", "is_taken", "mark", "spellings"]
