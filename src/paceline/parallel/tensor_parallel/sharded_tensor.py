"""A tensor subclass that holds one rank's shard, reports the whole shape and propagates its sharding.

A function without a rule first all-gathers the whole tensor: correct, only slower, and noted. So any model's own
forward computes what it computes in one process.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function as autograd_function

from paceline.errors import LayoutError
from paceline.parallel.tensor_parallel.collectives import TensorParallelGroup, copy_in, gather, take_own
from paceline.parallel.tensor_parallel.sharding import DimSharding, IncompatibleReshape
from paceline.torch_internals.function_signatures import SIGNATURES, read_call
from paceline.torch_internals.private_api import (
    is_inside_functorch,
    make_wrapper_tensor,
    tensor_version,
    tree_flatten,
    tree_unflatten,
)

RULES: dict[str, "Rule"] = {}
TRANSFORM = " inside torch.func"
AUTOGRAD = autograd_function.__file__


class NoRule(Exception):
    """The error raised when no rule keeps the sharding in this call."""

    def __init__(self, misfit: IncompatibleReshape | None = None) -> None:
        super().__init__()
        self.misfit = misfit


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A call of a torch function: as it was written, and its arguments by name if its signature is in the table."""

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    given: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return an argument by the name of its parameter."""
        return self.given[name]

    def values(self) -> list[Any]:
        """Return every argument, in whichever place it was given."""
        return [*self.args, *self.kwargs.values()]

    def replacing(self, change: Callable[[Any], Any]) -> Any:
        """Call the function in the same spelling with other arguments."""
        named = {key: change(value) for key, value in self.kwargs.items()}
        return self.func(*(change(value) for value in self.args), **named)


Rule = Callable[[FunctionCall], Any]


@dataclass(frozen=True, kw_only=True)
class JoinedTensor:
    """A gathered whole tensor, its version when it was gathered (`written`) and the version of its shard (`of`)."""

    whole: Tensor
    written: int
    of: int


class ShardPropagatingTensor(Tensor):
    """This rank's shard `local` of a tensor of shape `whole`, sharded as `cut`; `origins` are its source parameters."""

    local: Tensor
    cut: DimSharding
    wire: TensorParallelGroup
    origins: frozenset[str]
    whole: tuple[int, ...]
    joined: dict[tuple[bool, bool], "JoinedTensor"]
    truth: Tensor | None
    """The whole tensor as one process has it; set only while a plan is searched or checked."""

    @staticmethod
    def of(
        local: Tensor, cut: DimSharding, wire: TensorParallelGroup, *, origins: Iterable[str] = ()
    ) -> "ShardPropagatingTensor":
        """Wrap a local tensor with its sharding; the whole shape follows from both."""
        shape = tuple(local.shape)
        whole = (*shape[: cut.dim], cut.size, *shape[cut.dim + 1 :])
        made: ShardPropagatingTensor = make_wrapper_tensor(ShardPropagatingTensor, like=local, shape=whole)
        made.__dict__.update(local=local, cut=cut, wire=wire, origins=frozenset(origins), whole=whole)
        made.joined, made.truth = {}, None
        return made

    def gathered(self, *, partial: bool = False) -> Tensor:
        """Return the whole tensor: gathered once, and again only after the shard was written to."""
        if self.truth is not None:
            return self.truth
        key = (partial, torch.is_grad_enabled())
        known = self.joined.get(key)
        if known is None or known.of != tensor_version(self.local):
            whole = gather(self.local, self.cut, self.wire, partial=partial)
            known = self.joined[key] = JoinedTensor(
                whole=whole, written=tensor_version(whole), of=tensor_version(self.local)
            )
        return known.whole

    def refuse_lost_writes(self) -> None:
        """Raise if code wrote in place to a view of the gathered tensor, because the shard would miss the write."""
        if any(tensor_version(known.whole) != known.written for known in self.joined.values()) and not is_searching(
            self
        ):
            raise _writes_in_place("a view of it, made by a function without a rule,", self)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a torch function by its rule, or else on the whole tensor."""
        kwargs = kwargs or {}
        name = name_of(func)
        for value in (*args, *kwargs.values()):
            if isinstance(value, ShardPropagatingTensor) and value.joined:
                value.refuse_lost_writes()
        if is_inside_functorch() and not name.startswith("."):
            return _seen_by_transform(func, args, kwargs, name=name)
        if not torch.is_grad_enabled() and not name.startswith("."):
            _refuse_own_autograd()
        try:
            seeker = next((v.wire for v in (*args, *kwargs.values()) if isinstance(v, ShardPropagatingTensor)), None)
            answer = getattr(seeker or split_in(args, kwargs)[0].wire, "answer", by_rule)
            return answer(func, args, kwargs, name=name)
        except NoRule as unknown:
            return on_whole(func, args, kwargs, name=name, misfit=unknown.misfit)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise, except in a plan search: only custom operators, autograd functions and `torch.func` reach this."""
        if all(is_searching(split) for split in split_in(args, kwargs)):
            return _seen_by_transform(func, args, kwargs or {}, name=name_of(func))
        raise LayoutError(
            f"{func} was called on a tensor that is sharded over the tensor-parallel ranks.",
            cause="a custom autograd function or operator reads an activation that is split over the ranks",
            hint="keep the module around it whole: --place.replicate ITS_NAME",
        )


def by_rule(func: Any, args: Any, kwargs: Any, *, name: str) -> Any:
    """Apply a function by its rule. Raise `NoRule` if it has no rule or the call does not fit its signature."""
    rule = RULES.get(name)
    given = read_call(name, args, kwargs) if name in SIGNATURES else {}
    if rule is None or given is None:
        raise NoRule
    return rule(FunctionCall(func=func, name=name, args=tuple(args), kwargs=kwargs, given=given))


def name_of(func: Any) -> str:
    """Return the name under which a rule is registered: a function's or method's own, or `.name` for an attribute."""
    name: str = getattr(func, "__name__", "")
    if name != "__get__":
        return name
    read: Any = func.__self__
    read = read.fget if isinstance(read, property) else read
    return f".{read.__name__}"


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the decorated rule for these functions."""

    def add(made: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = made
        return made

    return add


def split_in(args: Any, kwargs: Any) -> list[ShardPropagatingTensor]:
    """Return every sharded tensor among the arguments, including those in lists."""
    return [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, ShardPropagatingTensor)]


def on_whole(func: Any, args: Any, kwargs: Any, *, name: str, misfit: IncompatibleReshape | None = None) -> Any:
    """Gather the sharded arguments, and apply the function to the whole tensors.

    Raises:
        LayoutError: the function wrote in place to a gathered argument; the shards would miss the write.
    """
    splits = split_in(args, kwargs)
    for split in splits:
        record_all_gather(split, name, misfit)
    if name == "__set__":
        if not is_searching(splits[0]):
            raise _writes_in_place(f"{func.__self__.__name__} = ...", splits[0])
        return None
    leaves, shape = tree_flatten((args, kwargs))
    wholes = [leaf.gathered() if isinstance(leaf, ShardPropagatingTensor) else leaf for leaf in leaves]
    before = [tensor_version(whole) for whole in wholes if isinstance(whole, Tensor)]
    args, kwargs = tree_unflatten(wholes, shape)
    made = func(*args, **kwargs)
    after = [tensor_version(whole) for whole in wholes if isinstance(whole, Tensor)]
    cut = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf, then, now in zip(cut, before, after, strict=True):
        if isinstance(leaf, ShardPropagatingTensor) and then != now and not is_searching(leaf):
            raise _writes_in_place(name.strip("."), leaf)
    return made


def _writes_in_place(what: str, split: ShardPropagatingTensor) -> LayoutError:
    return LayoutError(
        f"{what} writes in place into a tensor that is sharded over the tensor-parallel ranks "
        f"({', '.join(sorted(split.origins)[:2]) or 'an activation'}).",
        hint="keep the module that does it whole: --place.replicate ITS_NAME",
    )


def _seen_by_transform(func: Any, args: Any, kwargs: Any, *, name: str) -> Any:
    """Apply a function to whole tensors inside vmap, grad or jvp, where a sum over ranks has no rule.

    Raises unless a plan is being searched; the search keeps whole what such code reads.
    """
    for split in split_in(args, kwargs):
        if not is_searching(split):
            raise LayoutError(
                f"{name} is called inside torch.func (vmap, grad, jvp, ...) on a tensor that is "
                f"sharded over the tensor-parallel ranks ({', '.join(sorted(split.origins)[:2]) or 'an activation'}).",
                hint="keep the modules that it goes through whole: --place.replicate NAME; or --layout fsdp",
            )
        record_all_gather(split, f"{name}{TRANSFORM}" if is_inside_functorch() else name)
    leaves, shape = tree_flatten((args, kwargs))
    whole = [leaf.gathered() if isinstance(leaf, ShardPropagatingTensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(whole, shape)
    return func(*args, **kwargs)


def is_searching(split: ShardPropagatingTensor) -> bool:
    """Return whether the plan is still being searched for."""
    return hasattr(split.wire, "blocked")


def _refuse_own_autograd() -> None:
    """Raise if a custom autograd function reads a sharded tensor, whose gradient would be lost in the wrapper."""
    name, given = _own_autograd()
    for split in given:
        if not is_searching(split):
            raise LayoutError(
                f"{name} is a custom autograd function that reads a tensor that is sharded over the "
                f"tensor-parallel ranks ({', '.join(sorted(split.origins)[:2])}).",
                hint="keep the modules whose outputs it reads whole: --place.replicate NAME",
            )
        record_all_gather(split, f"{name}, a custom autograd function")


def _own_autograd() -> tuple[str, list[ShardPropagatingTensor]]:
    """Return the custom autograd function whose forward is running, and the sharded tensors among its arguments."""
    frame: FrameType | None = sys._getframe(3)
    for _ in range(12):
        if frame is None:
            break
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename == AUTOGRAD:
            given = [a for a in frame.f_locals.get("args", ()) if isinstance(a, ShardPropagatingTensor)]
            return str(frame.f_locals["cls"].__name__), given
        frame = frame.f_back
    return "", []


def record_all_gather(split: ShardPropagatingTensor, name: str, misfit: IncompatibleReshape | None = None) -> None:
    """Record that a whole tensor is gathered for the function `name`."""
    listener = getattr(split.wire, "blocked", None)
    if listener is not None:
        listener(split.origins, name, misfit)
    of = ", ".join(sorted(split.origins)[:2]) or "an activation"
    split.wire.tell(f"{of} is gathered for {name.strip('.')}: correct, but slower")


def wire_and_origins(splits: Iterable[ShardPropagatingTensor]) -> tuple[TensorParallelGroup, frozenset[str]]:
    """Return the tensors' group, and all parameters that they come from."""
    found = list(splits)
    if len(found) == 1:
        return found[0].wire, found[0].origins
    return found[0].wire, frozenset().union(*(split.origins for split in found))


def operand(value: Any, *, of: ShardPropagatingTensor, dim: int) -> Any:
    """Return this rank's piece of another operand, aligned from the right: `dim` is negative and sharded in `of`.

    A whole operand that has the dimension is sliced; one that lacks it, or has size 1 there, is read whole by every
    rank. If `of` has size 1 along `dim`, held by one rank, nothing can be broadcast along it.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, ShardPropagatingTensor):
        if value.cut.dim - len(value.whole) != dim or value.cut.sections != of.cut.sections:
            raise NoRule
        return value.local
    if value.dim() < -dim or value.shape[dim] == 1:
        return copy_in(value, of.wire)
    if value.shape[dim] != of.cut.size:
        raise NoRule  # a size of 1, which broadcasts; or a mistake that torch reports
    return take_own(value, of.cut.at(value.dim() + dim), of.wire)
