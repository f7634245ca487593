"""Dry runs, which search or check a plan; in them, each sharded tensor also stores the full tensor of one process.

User code reads the values of one process, so an `assert`, a `while error > tolerance` or a branch behaves as in the
real run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from paceline.comm.process_group import World
from paceline.comm.rank_threads import run_simulated_ranks
from paceline.errors import LayoutError, current_user_line
from paceline.parallel.tensor_parallel.collectives import TensorParallelGroup, WorldGroup
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor, apply_rule
from paceline.parallel.tensor_parallel.sharding import DimSharding, IncompatibleReshape, slice_shard
from paceline.torch_internals.function_signatures import bind_arguments
from paceline.torch_internals.private_api import tree_flatten, tree_unflatten

_FACTORIES = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


def wrap_full_tensor(
    full_tensor: Tensor, sharding: DimSharding, group: "DryRunGroup", *, origins: Any = ()
) -> ShardPropagatingTensor:
    """Wrap a full tensor as the sharded tensor of rank 0."""
    sharded = ShardPropagatingTensor.from_local(slice_shard(full_tensor, sharding, 0), sharding, group, origins=origins)
    sharded.reference = full_tensor
    return sharded


def attach_reference(result: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a function with the values of one process.

    For this, also compute the function on full tensors. Each sharded tensor in `result` gets the full tensor as its
    `reference`. Other tensors in `result` are replaced by those of one process.
    """
    leaves, spec = tree_flatten(result)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return result
    references = tree_flatten(_call_in_one_process(func, args, kwargs))[0]
    for leaf, reference in zip(leaves, references, strict=True):
        if isinstance(leaf, ShardPropagatingTensor):
            leaf.reference = reference
    return tree_unflatten(
        [
            leaf if isinstance(leaf, ShardPropagatingTensor) else reference
            for leaf, reference in zip(leaves, references, strict=True)
        ],
        spec,
    )


def _call_in_one_process(func: Any, args: Any, kwargs: Any) -> Any:
    """Call the function on the full tensors of its sharded arguments."""
    leaves, spec = tree_flatten((args, kwargs))
    args, kwargs = tree_unflatten(
        [leaf.full_tensor() if isinstance(leaf, ShardPropagatingTensor) else leaf for leaf in leaves], spec
    )
    return func(*args, **kwargs)


@dataclass(kw_only=True)
class DryRunGroup:
    """A tensor-parallel group that consists of rank 0 alone.

    Each function is also computed on the full tensors, and this result is returned. So code that branches on a value
    takes the same branch as in the real run. `all_gathers` records each function that needed a full tensor: the
    parameters from which the tensor was computed, the function's name, and the reshape if it was incompatible. `heads`
    maps the names of projection weights to numbers of heads.
    """

    rank: int = 0
    size: int
    sequence: bool = False
    all_gathers: list[tuple[frozenset[str], str, IncompatibleReshape | None]] = field(default_factory=list)
    heads: dict[str, int] = field(default_factory=dict)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Return the tensor unchanged."""
        return tensor

    def all_reduce_max(self, tensor: Tensor) -> Tensor:
        """Return the tensor unchanged."""
        return tensor

    def all_gather(self, tensor: Tensor, sharding: DimSharding) -> Tensor:
        """Return the full tensor with zeros for the other ranks' shards; only all-gathers inside rules use this."""
        shape = [sharding.size if d == sharding.dim else n for d, n in enumerate(tensor.shape)]
        full_tensor, offset = tensor.new_zeros(shape), 0
        for start, stop in sharding.ranges(self.rank):
            full_tensor.narrow(sharding.dim, start, stop - start).copy_(
                tensor.narrow(sharding.dim, offset, stop - start)
            )
            offset += stop - start
        return full_tensor

    def reduce_scatter(self, tensor: Tensor, sharding: DimSharding) -> Tensor:
        """Return rank 0's shard of the tensor."""
        return slice_shard(tensor, sharding, self.rank)

    def record_note(self, note: str) -> None:
        """Do nothing: `on_all_gather` records the all-gathers."""

    def on_all_gather(
        self, origins: frozenset[str], name: str, incompatible_reshape: IncompatibleReshape | None
    ) -> None:
        """Record that a function needed the full tensor."""
        self.all_gathers.append((origins, name.strip("."), incompatible_reshape))

    def on_heads_viewed(self, origins: frozenset[str], heads: int) -> None:
        """Record that the output of a projection was reshaped to this number of heads."""
        for origin in origins:
            self.heads.setdefault(origin, heads)

    def apply_function(self, func: Any, args: Any, kwargs: Any, *, name: str) -> Any:
        """Apply a function by its rule, and return the values of one process with the sharding of the rule."""
        return attach_reference(apply_rule(func, args, kwargs, name=name), func, args, kwargs)


class ShardedParameterMode(TorchFunctionMode):
    """A function mode that replaces the parameters with these ids by sharded tensors."""

    def __init__(self, shardings: Mapping[int, DimSharding], group: "PlanCheckGroup") -> None:
        super().__init__()
        self._shardings, self._group = shardings, group
        self._sharded_tensors: dict[int, ShardPropagatingTensor] = {}

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace the parameters among the arguments, and call the function."""
        leaves, spec = tree_flatten((args, kwargs or {}))
        args, kwargs = tree_unflatten([self._replace_parameter(leaf) for leaf in leaves], spec)
        return func(*args, **kwargs)

    def _replace_parameter(self, value: Any) -> Any:
        sharding = self._shardings.get(id(value))
        if sharding is None:
            return value
        if id(value) not in self._sharded_tensors:
            self._sharded_tensors[id(value)] = wrap_full_tensor(value.detach(), sharding, self._group)
        return self._sharded_tensors[id(value)]


@dataclass(kw_only=True)
class PlanCheckGroup(DryRunGroup):
    """A group that checks a finished plan.

    All ranks, as threads, compute each function on shards of one process's tensors. The results are compared with those
    of one process. `calls` counts the functions that were computed in this way.
    """

    calls: int = 0

    @override
    def apply_function(self, func: Any, args: Any, kwargs: Any, *, name: str) -> Any:
        """Apply a function by its rule on every rank, and compare the results with those of one process.

        Raises:
            LayoutError: a result on a rank differs from that of one process.
        """
        if _draws_random_numbers(name, args, kwargs) or name in _FACTORIES or name.startswith("."):
            return super().apply_function(func, args, kwargs, name=name)
        leaves, args_spec = tree_flatten((args, kwargs))
        can_share = name.rstrip("_") == name and not kwargs.get("inplace")
        autocast_settings = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _devices(leaves)]

        def on_rank(world: World) -> tuple[list[Any], list[Any]]:
            group = WorldGroup(world)
            local_leaves = [_local_leaf(leaf, group, can_share=can_share) for leaf in leaves]
            local_args, local_kwargs = tree_unflatten(local_leaves, args_spec)
            with torch.no_grad(), _Autocast(autocast_settings):
                return tree_flatten(apply_rule(func, local_args, local_kwargs, name=name)), local_leaves  # type: ignore[return-value]

        rank_results = run_simulated_ranks(on_rank, ranks=self.size)
        self.calls += 1
        (results, spec), local_leaves = rank_results[0]
        if not any(isinstance(leaf, Tensor) for leaf in results):
            return tree_unflatten(results, spec)
        references = tree_flatten(_call_in_one_process(func, args, kwargs))[0]
        self._compare_ranks(name, [leaves_of_rank for (leaves_of_rank, _), _ in rank_results], references)
        return tree_unflatten(
            [self._with_reference(*pair, local_leaves, leaves) for pair in zip(results, references, strict=True)], spec
        )

    def _with_reference(self, result: Any, reference: Any, local_leaves: list[Any], leaves: list[Any]) -> Any:
        """Return a result with its reference; for an in-place function, return the argument that it has changed."""
        if not isinstance(result, ShardPropagatingTensor):
            return reference
        original = next(
            (leaf for leaf, local_leaf in zip(leaves, local_leaves, strict=True) if local_leaf is result), None
        )
        if original is None:
            return wrap_full_tensor(reference, result.sharding, self, origins=result.origins)
        original.reference = reference
        return original

    def _compare_ranks(self, name: str, rank_results: list[list[Any]], references: list[Any]) -> None:
        """Raise LayoutError if a result of a rank differs from its shard of the reference, by more than rounding."""
        has_floats = any(isinstance(reference, Tensor) and reference.is_floating_point() for reference in references)
        for rank, results in enumerate(rank_results):
            for result, reference in zip(results, references, strict=True):
                if not isinstance(reference, Tensor) or (has_floats and not reference.is_floating_point()):
                    continue  # indices may differ where values are equal
                local, expected = (
                    (result.local, slice_shard(reference, result.sharding, rank))
                    if isinstance(result, ShardPropagatingTensor)
                    else (result, reference)
                )
                difference = _describe_difference(local, expected, reference)
                if difference:
                    raise LayoutError(
                        f"{name.strip('.')} on a tensor split by tp={self.size} gives {difference} (rank {rank}).",
                        where=str(current_user_line() or ""),
                        cause="the plan was tried on one microbatch, and each function was compared with one process",
                        hint="--place.replicate NAME for the module that computes this tensor, or --layout fsdp; "
                        "and report this as a bug",
                    )


class _Autocast:
    """A context manager that applies autocast settings of one thread in another thread."""

    def __init__(self, settings: list[tuple[str, bool, torch.dtype]]) -> None:
        self._contexts = [
            torch.autocast(device, dtype=dtype, enabled=True) for device, is_enabled, dtype in settings if is_enabled
        ]

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: Any) -> None:
        for context in self._contexts:
            context.__exit__(*error)


def _draws_random_numbers(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether the call draws random numbers; it is not compared, since all threads share one generator."""
    arguments = bind_arguments(name, args, kwargs) if name in ("dropout", "scaled_dot_product_attention") else None
    return arguments is not None and bool(arguments.get("dropout_p") or (arguments.get("p") and arguments["training"]))


def _devices(leaves: list[Any]) -> set[str]:
    """Return the device types of the tensors among these leaves that support autocast."""
    device_types = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    return {device_type for device_type in device_types if torch.amp.is_autocast_available(device_type)}


def _local_leaf(leaf: Any, group: TensorParallelGroup, *, can_share: bool) -> Any:
    """Return an argument as a rank gets it; `can_share` is True if the function does not write to its arguments."""
    if not isinstance(leaf, Tensor):
        return leaf
    if not isinstance(leaf, ShardPropagatingTensor):
        return leaf if can_share else leaf.clone()
    shard = slice_shard(leaf.full_tensor(), leaf.sharding, group.rank)
    return ShardPropagatingTensor.from_local(
        shard if can_share else shard.clone(), leaf.sharding, group, origins=leaf.origins
    )


def _describe_difference(result: Any, expected: Tensor, full_reference: Tensor) -> str:
    """Return a description of the difference to one process's result, or "" if it is within rounding."""
    if result.shape != expected.shape:
        return f"shape {list(result.shape)} instead of {list(expected.shape)}"
    if not full_reference.is_floating_point():
        return "" if torch.equal(result, expected) else "different values than one process"
    if not expected.numel() or expected.is_meta:
        return ""
    is_equal = (result == expected) | (result.isnan() & expected.isnan())
    difference = (result.double() - expected.double()).abs().masked_fill(is_equal, 0.0).max()
    scale = full_reference.double().abs().masked_fill(~full_reference.isfinite(), 0.0).max().clamp(min=1e-30)
    tolerance = (
        0.25
        if full_reference.dtype in (torch.float16, torch.bfloat16)
        else 4096 * torch.finfo(full_reference.dtype).eps
    )
    return (
        ""
        if difference <= tolerance * scale
        else f"values that differ from those of one process by {float(difference / scale):.1e} of the largest value"
    )
