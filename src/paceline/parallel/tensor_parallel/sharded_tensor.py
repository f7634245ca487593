"""A tensor subclass that holds one rank's shard, reports the full shape and propagates its sharding.

A call of a function without a sharding rule first all-gathers the full tensor. The result is correct but slower, and a
note for the user reports the all-gather. So the forward of a model computes the same result as in one process. The
exceptions raise LayoutError: a write in place to a gathered tensor, and a custom autograd function, a custom operator
or a `torch.func` transform that reads a sharded tensor.
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import function as autograd_function
from typing_extensions import override

from paceline.errors import LayoutError
from paceline.parallel.tensor_parallel.collectives import (
    TensorParallelGroup,
    copy_to_parallel_region,
    gather_shards,
    local_piece,
    take_local_shard,
)
from paceline.parallel.tensor_parallel.sharding import DimSharding, IncompatibleReshape
from paceline.torch_internals.function_signatures import SIGNATURES, bind_arguments
from paceline.torch_internals.private_api import (
    is_inside_functorch,
    make_wrapper_tensor,
    tensor_version,
    tree_flatten,
    tree_unflatten,
)

RULES: dict[str, "Rule"] = {}
INSIDE_TRANSFORM = " inside torch.func"
AUTOGRAD_FUNCTION_FILE = autograd_function.__file__


class NoRule(Exception):
    """The error for a call whose result cannot be computed on the shards by any rule."""

    def __init__(self, incompatible_reshape: IncompatibleReshape | None = None) -> None:
        super().__init__()
        self.incompatible_reshape = incompatible_reshape


@dataclass(kw_only=True, slots=True)  # a frozen one would take twice as long to construct, at each operation
class FunctionCall:
    """A call of a torch function.

    `args` and `kwargs` are those of the call. `arguments` maps parameter names to values, if the table of signatures
    contains the function.
    """

    func: Any
    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        """Return an argument by the name of its parameter."""
        return self.arguments[name]

    def values(self) -> list[Any]:
        """Return the values of all positional and keyword arguments."""
        return [*self.args, *self.kwargs.values()]

    def call_with(self, change: Callable[[Any], Any]) -> Any:
        """Call the function with each argument replaced by `change(argument)`."""
        new_kwargs = {key: change(value) for key, value in self.kwargs.items()}
        return self.func(*(change(value) for value in self.args), **new_kwargs)


Rule = Callable[[FunctionCall], Any]


@dataclass(frozen=True, kw_only=True)
class GatheredTensor:
    """A gathered full tensor, with its version and that of its shard at the time of the all-gather."""

    full_tensor: Tensor
    full_version: int
    local_version: int


class ShardPropagatingTensor(Tensor):
    """This rank's shard `local` of a tensor of shape `full_shape`.

    `origins` are the names of the parameters from which the tensor was computed.
    """

    local: Tensor
    sharding: DimSharding
    group: TensorParallelGroup
    origins: frozenset[str]
    full_shape: tuple[int, ...]
    gathered_tensors: dict[tuple[bool, bool], "GatheredTensor"]
    """The all-gathered tensors, by `has_partial_grad` (see `gather_shards`) and whether gradients were enabled."""
    reference: Tensor | None
    """The full tensor as one process computes it; set only while a plan is searched or checked."""

    @staticmethod
    def from_local(
        local: Tensor, sharding: DimSharding, group: TensorParallelGroup, *, origins: Iterable[str] = ()
    ) -> "ShardPropagatingTensor":
        """Wrap a local shard; its shape and its sharding determine the full shape."""
        shape = tuple(local.shape)
        full_shape = (*shape[: sharding.dim], sharding.size, *shape[sharding.dim + 1 :])
        tensor: ShardPropagatingTensor = make_wrapper_tensor(ShardPropagatingTensor, like=local, shape=full_shape)
        tensor.__dict__.update(
            local=local, sharding=sharding, group=group, origins=frozenset(origins), full_shape=full_shape,
            gathered_tensors={}, reference=None,
        )  # fmt: skip
        return tensor

    def with_parameter(self, parameter: Tensor) -> "ShardPropagatingTensor":
        """Return the sharded tensor of another tensor in place of the stored piece of a parameter."""
        local = local_piece(parameter, self.sharding, self.group)
        return ShardPropagatingTensor.from_local(local, self.sharding, self.group, origins=self.origins)

    def full_tensor(self, *, has_partial_grad: bool = False) -> Tensor:
        """Return the full tensor; the all-gather is cached until the shard is written to.

        Set `has_partial_grad` if sharded operations read the result. It has the same meaning as in `gather_shards`.
        """
        if self.reference is not None:
            return self.reference
        key = (has_partial_grad, torch.is_grad_enabled())
        cached = self.gathered_tensors.get(key)
        if cached is None or cached.local_version != tensor_version(self.local):
            full_tensor = gather_shards(self.local, self.sharding, self.group, has_partial_grad=has_partial_grad)
            cached = self.gathered_tensors[key] = GatheredTensor(
                full_tensor=full_tensor,
                full_version=tensor_version(full_tensor),
                local_version=tensor_version(self.local),
            )
        return cached.full_tensor

    def refuse_lost_writes(self) -> None:
        """Raise LayoutError if code wrote in place to a gathered tensor, since the shard does not have the change."""
        if any(
            tensor_version(cached.full_tensor) != cached.full_version for cached in self.gathered_tensors.values()
        ) and not is_searching(self):
            raise _in_place_write_error("the code, through a view from a function without a sharding rule,", self)

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Apply a torch function by its sharding rule, or to the full tensors if no rule applies."""
        kwargs = kwargs or {}
        name = function_name(func)
        group: TensorParallelGroup | None = None
        for value in (*args, *kwargs.values()):
            if isinstance(value, ShardPropagatingTensor):
                group = value.group if group is None else group
                if value.gathered_tensors:
                    value.refuse_lost_writes()
        if is_inside_functorch() and not name.startswith("."):
            return _apply_inside_transform(func, args, kwargs, name=name)
        if not torch.is_grad_enabled() and not name.startswith("."):
            _refuse_custom_autograd()
        try:
            group = find_sharded_tensors(args, kwargs)[0].group if group is None else group
            apply = getattr(group, "apply_function", apply_rule)  # the groups of a plan search have `apply_function`
            return apply(func, args, kwargs, name=name)
        except NoRule as no_rule:
            return apply_to_full_tensors(
                func, args, kwargs, name=name, incompatible_reshape=no_rule.incompatible_reshape
            )

    @classmethod
    @override
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Raise an error, except in a plan search.

        Only custom operators, custom autograd functions and `torch.func` transforms reach this method.
        """
        if all(is_searching(tensor) for tensor in find_sharded_tensors(args, kwargs)):
            return _apply_inside_transform(func, args, kwargs or {}, name=function_name(func))
        raise LayoutError(
            f"{func} was called on a tensor that is sharded over the tensor-parallel ranks.",
            cause="a custom autograd function or operator reads an activation that is split over the ranks",
            hint="do not split the module that calls it: --place.replicate ITS_NAME",
        )


def apply_rule(func: Any, args: Any, kwargs: Any, *, name: str) -> Any:
    """Apply a function by its rule. Raise `NoRule` if it has no rule or the call does not match the signature."""
    rule = RULES.get(name)
    arguments = bind_arguments(name, args, kwargs) if name in SIGNATURES else {}
    if rule is None or arguments is None:
        raise NoRule
    return rule(FunctionCall(func=func, name=name, args=tuple(args), kwargs=kwargs, arguments=arguments))


def function_name(func: Any) -> str:
    """Return the name under which a rule is registered: the function's `__name__`, or `.name` for an attribute."""
    name: str = getattr(func, "__name__", "")
    if name != "__get__":
        return name
    getter: Any = func.__self__
    getter = getter.fget if isinstance(getter, property) else getter
    return f".{getter.__name__}"


def register_rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the decorated rule for these functions."""

    def add(new_rule: Rule) -> Rule:
        for name in names:
            assert name not in RULES, name
            RULES[name] = new_rule
        return new_rule

    return add


def find_sharded_tensors(args: Any, kwargs: Any) -> list[ShardPropagatingTensor]:
    """Return every sharded tensor among the arguments, including those in lists."""
    return [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, ShardPropagatingTensor)]


def apply_to_full_tensors(
    func: Any, args: Any, kwargs: Any, *, name: str, incompatible_reshape: IncompatibleReshape | None = None
) -> Any:
    """Gather the sharded arguments, and apply the function to the full tensors.

    Raises:
        LayoutError: the function wrote in place to a gathered argument; the shard does not contain the write.
    """
    sharded_tensors = find_sharded_tensors(args, kwargs)
    for tensor in sharded_tensors:
        record_all_gather(tensor, name, incompatible_reshape)
    if name == "__set__":
        if not is_searching(sharded_tensors[0]):
            raise _in_place_write_error(f"{func.__self__.__name__} = ...", sharded_tensors[0])
        return None
    leaves, spec = tree_flatten((args, kwargs))
    full_leaves = [leaf.full_tensor() if isinstance(leaf, ShardPropagatingTensor) else leaf for leaf in leaves]
    versions_before = [tensor_version(leaf) for leaf in full_leaves if isinstance(leaf, Tensor)]
    args, kwargs = tree_unflatten(full_leaves, spec)
    result = func(*args, **kwargs)
    versions_after = [tensor_version(leaf) for leaf in full_leaves if isinstance(leaf, Tensor)]
    tensor_leaves = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf, old_version, new_version in zip(tensor_leaves, versions_before, versions_after, strict=True):
        if isinstance(leaf, ShardPropagatingTensor) and old_version != new_version and not is_searching(leaf):
            raise _in_place_write_error(name.strip("."), leaf)
    return result


def _in_place_write_error(description: str, tensor: ShardPropagatingTensor) -> LayoutError:
    return LayoutError(
        f"{description} writes in place into a tensor that is sharded over the tensor-parallel ranks "
        f"({', '.join(sorted(tensor.origins)[:2]) or 'an activation'}).",
        hint="do not split the module that writes: --place.replicate ITS_NAME",
    )


def _apply_inside_transform(func: Any, args: Any, kwargs: Any, *, name: str) -> Any:
    """Apply a function to full tensors inside vmap, grad or jvp, which cannot transform a sum over ranks.

    This is possible only in a plan search, which records the call and does not shard the parameters that it reads.

    Raises:
        LayoutError: no plan search is running.
    """
    for tensor in find_sharded_tensors(args, kwargs):
        if not is_searching(tensor):
            raise LayoutError(
                f"{name} is called inside torch.func (vmap, grad, jvp, ...) on a tensor that is "
                f"sharded over the tensor-parallel ranks ({', '.join(sorted(tensor.origins)[:2]) or 'an activation'}).",
                hint="do not split the modules that it goes through: --place.replicate NAME; or --layout fsdp",
            )
        record_all_gather(tensor, f"{name}{INSIDE_TRANSFORM}" if is_inside_functorch() else name)
    leaves, spec = tree_flatten((args, kwargs))
    full_leaves = [leaf.full_tensor() if isinstance(leaf, ShardPropagatingTensor) else leaf for leaf in leaves]
    args, kwargs = tree_unflatten(full_leaves, spec)
    return func(*args, **kwargs)


def is_searching(tensor: ShardPropagatingTensor) -> bool:
    """Return whether the tensor belongs to the run that searches or checks a plan."""
    return hasattr(tensor.group, "on_all_gather")


def _refuse_custom_autograd() -> None:
    """Raise LayoutError if the running custom autograd function reads a sharded tensor, which would get no gradient.

    A plan search does not raise but records the call.
    """
    name, arguments = _find_custom_autograd()
    for tensor in arguments:
        if not is_searching(tensor):
            raise LayoutError(
                f"{name} is a custom autograd function that reads a tensor that is sharded over the "
                f"tensor-parallel ranks ({', '.join(sorted(tensor.origins)[:2])}).",
                hint="do not split the modules whose outputs it reads: --place.replicate NAME",
            )
        record_all_gather(tensor, f"{name}, a custom autograd function")


def _find_custom_autograd() -> tuple[str, list[ShardPropagatingTensor]]:
    """Return the name of the custom autograd function whose forward is running, and its sharded arguments.

    Return "" and an empty list if none is running.
    """
    frame: FrameType | None = sys._getframe(3)  # the caller of `__torch_function__`
    for _ in range(12):  # torch has fewer frames than this between `apply` and the call
        if frame is None:
            break
        if frame.f_code.co_name == "apply" and frame.f_code.co_filename == AUTOGRAD_FUNCTION_FILE:
            arguments = [a for a in frame.f_locals.get("args", ()) if isinstance(a, ShardPropagatingTensor)]
            return str(frame.f_locals["cls"].__name__), arguments
        frame = frame.f_back
    return "", []


def record_all_gather(
    tensor: ShardPropagatingTensor, name: str, incompatible_reshape: IncompatibleReshape | None = None
) -> None:
    """Record that a full tensor is gathered for the function `name`."""
    listener = getattr(tensor.group, "on_all_gather", None)
    if listener is not None:
        listener(tensor.origins, name, incompatible_reshape)
    source = ", ".join(sorted(tensor.origins)[:2]) or "an activation"
    tensor.group.record_note(f"{source} is gathered for {name.strip('.')}: correct, but slower")


def common_group_and_origins(
    sharded_tensors: Iterable[ShardPropagatingTensor],
) -> tuple[TensorParallelGroup, frozenset[str]]:
    """Return the group of the tensors, and the union of their `origins`."""
    tensors = list(sharded_tensors)
    if len(tensors) == 1:
        return tensors[0].group, tensors[0].origins
    return tensors[0].group, frozenset().union(*(tensor.origins for tensor in tensors))


def local_operand(value: Any, *, like: ShardPropagatingTensor, dim: int) -> Any:
    """Return the part of an operand that this rank combines with the sharded tensor `like` in a broadcast.

    `dim` is the sharded dimension of `like`, counted from the end (negative). A full operand is sliced if it has this
    dimension. If it lacks the dimension or has size 1 there, the part is the full operand. An operand
    with another size there raises `NoRule`.
    """
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, ShardPropagatingTensor):
        if value.sharding.dim - len(value.full_shape) != dim or value.sharding.sections != like.sharding.sections:
            raise NoRule
        return value.local
    if value.dim() < -dim or value.shape[dim] == 1:
        return copy_to_parallel_region(value, like.group)
    if value.shape[dim] != like.sharding.size:
        raise NoRule  # `like` has size 1 and broadcasts, or the sizes do not match and torch raises the error
    return take_local_shard(value, like.sharding.with_dim(value.dim() + dim), like.group)
