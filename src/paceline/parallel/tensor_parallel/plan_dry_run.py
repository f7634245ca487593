"""Dry runs for searching and checking a plan: tensors carry one process's values beside their sharding.

User code sees the values of one process here, so an `assert`, a `while error > tolerance` or a branch behaves as it
does in the run.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.comm.process_group import World
from paceline.comm.rank_threads import run_simulated_ranks
from paceline.errors import LayoutError, line_now
from paceline.parallel.tensor_parallel.collectives import TensorParallelGroup, WorldWire, piece_of
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor, by_rule
from paceline.parallel.tensor_parallel.sharding import DimSharding, IncompatibleReshape
from paceline.torch_internals.function_signatures import read_call
from paceline.torch_internals.private_api import tree_flatten, tree_unflatten

_EMPTY = ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")


def shown_whole(whole: Tensor, cut: DimSharding, wire: "DryWire", *, origins: Any = ()) -> ShardPropagatingTensor:
    """Wrap a whole tensor as sharded."""
    made = ShardPropagatingTensor.of(piece_of(whole, cut, 0), cut, wire, origins=origins)
    made.truth = whole
    return made


def with_truth(made: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Replace the results of a rule by one process's values; sharded results stay sharded and get them as `truth`."""
    leaves, shape = tree_flatten(made)
    if not any(isinstance(leaf, Tensor) for leaf in leaves):
        return made
    true = tree_flatten(_one_process(func, args, kwargs))[0]
    for leaf, whole in zip(leaves, true, strict=True):
        if isinstance(leaf, ShardPropagatingTensor):
            leaf.truth = whole
    return tree_unflatten(
        [leaf if isinstance(leaf, ShardPropagatingTensor) else whole for leaf, whole in zip(leaves, true, strict=True)],
        shape,
    )


def _one_process(func: Any, args: Any, kwargs: Any) -> Any:
    leaves, shape = tree_flatten((args, kwargs))
    args, kwargs = tree_unflatten(
        [leaf.gathered() if isinstance(leaf, ShardPropagatingTensor) else leaf for leaf in leaves], shape
    )
    return func(*args, **kwargs)


@dataclass(kw_only=True)
class DryWire:
    """A tensor-parallel group that consists of rank 0 alone.

    Each function is also computed as in one process, and that result is returned. So code that branches on a value
    takes the same branch as in the run.
    """

    rank: int = 0
    size: int
    sequence: bool = False
    events: list[tuple[frozenset[str], str, IncompatibleReshape | None]] = field(default_factory=list)
    heads: dict[str, int] = field(default_factory=dict)

    def total(self, tensor: Tensor) -> Tensor:
        """Return the tensor unchanged."""
        return tensor

    def largest(self, tensor: Tensor) -> Tensor:
        """Return the tensor unchanged."""
        return tensor

    def join(self, tensor: Tensor, cut: DimSharding) -> Tensor:
        """Return the whole tensor with zeros for the other ranks' pieces; only a rule's own all-gathers use it."""
        shape = [cut.size if d == cut.dim else n for d, n in enumerate(tensor.shape)]
        whole, offset = tensor.new_zeros(shape), 0
        for start, stop in cut.ranges(self.rank):
            whole.narrow(cut.dim, start, stop - start).copy_(tensor.narrow(cut.dim, offset, stop - start))
            offset += stop - start
        return whole

    def total_piece(self, tensor: Tensor, cut: DimSharding) -> Tensor:
        """Return rank 0's piece of the tensor."""
        return piece_of(tensor, cut, self.rank)

    def tell(self, what: str) -> None:
        """Do nothing, since `blocked` records more."""

    def blocked(self, origins: frozenset[str], name: str, misfit: IncompatibleReshape | None) -> None:
        """Record that a function needed the whole tensor."""
        self.events.append((origins, name.strip("."), misfit))

    def read_as(self, origins: frozenset[str], heads: int) -> None:
        """Record that the output of a projection was viewed as this number of heads."""
        for origin in origins:
            self.heads.setdefault(origin, heads)

    def answer(self, func: Any, args: Any, kwargs: Any, *, name: str) -> Any:
        """Apply a function by its rule, and return one process's values, sharded as the rule says."""
        return with_truth(by_rule(func, args, kwargs, name=name), func, args, kwargs)


class ShownCuts(TorchFunctionMode):
    """A function mode in which the parameters with these ids appear as sharded tensors."""

    def __init__(self, cuts: Mapping[int, DimSharding], wire: "CheckWire") -> None:
        super().__init__()
        self._cuts, self._wire = cuts, wire
        self._shown: dict[int, ShardPropagatingTensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Show the parameters as sharded, and call the function."""
        leaves, shape = tree_flatten((args, kwargs or {}))
        args, kwargs = tree_unflatten([self._show(leaf) for leaf in leaves], shape)
        return func(*args, **kwargs)

    def _show(self, value: Any) -> Any:
        cut = self._cuts.get(id(value))
        if cut is None:
            return value
        if id(value) not in self._shown:
            self._shown[id(value)] = shown_whole(value.detach(), cut, self._wire)
        return self._shown[id(value)]


@dataclass(kw_only=True)
class CheckWire(DryWire):
    """A group that checks a finished plan.

    Each function is computed by all ranks, as threads, on pieces of one process's values, and compared with one
    process's result.
    """

    calls: int = 0

    def answer(self, func: Any, args: Any, kwargs: Any, *, name: str) -> Any:
        """Apply a function by its rule on every rank, and compare the results with one process's.

        Raises:
            LayoutError: a rank's value differs from those of one process.
        """
        if _draws(name, args, kwargs) or name in _EMPTY or name.startswith("."):
            return super().answer(func, args, kwargs, name=name)
        leaves, shape = tree_flatten((args, kwargs))
        keep = name.rstrip("_") == name and not kwargs.get("inplace")
        cast = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in _devices(leaves)]

        def on_rank(world: World) -> tuple[list[Any], list[Any]]:
            wire = WorldWire(world)
            mine = [_piece(leaf, wire, keep=keep) for leaf in leaves]
            given, named = tree_unflatten(mine, shape)
            with torch.no_grad(), _Autocast(cast):
                return tree_flatten(by_rule(func, given, named, name=name)), mine  # type: ignore[return-value]

        ranks = run_simulated_ranks(on_rank, ranks=self.size)
        self.calls += 1
        (found, spec), given = ranks[0]
        if not any(isinstance(leaf, Tensor) for leaf in found):
            return tree_unflatten(found, spec)
        true = tree_flatten(_one_process(func, args, kwargs))[0]
        self._hold(name, [one for (one, _), _ in ranks], true)
        return tree_unflatten([self._shown(*pair, given, leaves) for pair in zip(found, true, strict=True)], spec)

    def _shown(self, mine: Any, whole: Any, given: list[Any], leaves: list[Any]) -> Any:
        if not isinstance(mine, ShardPropagatingTensor):
            return whole
        same = next((leaf for leaf, own in zip(leaves, given, strict=True) if own is mine), None)
        if same is None:
            return shown_whole(whole, mine.cut, self, origins=mine.origins)
        same.truth = whole
        return same

    def _hold(self, name: str, ranks: list[list[Any]], true: list[Any]) -> None:
        has_floats = any(isinstance(whole, Tensor) and whole.is_floating_point() for whole in true)
        for rank, found in enumerate(ranks):
            for mine, whole in zip(found, true, strict=True):
                if not isinstance(whole, Tensor) or (has_floats and not whole.is_floating_point()):
                    continue  # e.g. indices: among equal values another one may come first
                own, expected = (
                    (mine.local, piece_of(whole, mine.cut, rank))
                    if isinstance(mine, ShardPropagatingTensor)
                    else (mine, whole)
                )
                apart = _apart(own, expected, whole)
                if apart:
                    raise LayoutError(
                        f"{name.strip('.')} on a tensor that tp={self.size} splits gives {apart} on rank {rank}.",
                        where=str(line_now() or ""),
                        cause="the plan was tried on one microbatch, and each function was compared with one process",
                        hint="--place.replicate NAME for the module that makes it, or --layout fsdp; "
                        "and report this as a bug",
                    )


class _Autocast:
    """A context manager that enables the calling thread's autocast settings in another thread."""

    def __init__(self, kept: list[tuple[str, bool, torch.dtype]]) -> None:
        self._all = [torch.autocast(device, dtype=dtype, enabled=on) for device, on, dtype in kept if on]

    def __enter__(self) -> None:
        for each in self._all:
            each.__enter__()

    def __exit__(self, *error: Any) -> None:
        for each in self._all:
            each.__exit__(*error)


def _draws(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether the call draws random numbers, whose generators threads share."""
    given = read_call(name, args, kwargs) if name in ("dropout", "scaled_dot_product_attention") else None
    return given is not None and bool(given.get("dropout_p") or (given.get("p") and given["training"]))


def _devices(leaves: list[Any]) -> set[str]:
    kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, Tensor)}
    return {kind for kind in kinds if torch.amp.is_autocast_available(kind)}


def _piece(leaf: Any, wire: TensorParallelGroup, *, keep: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    if not isinstance(leaf, ShardPropagatingTensor):
        return leaf if keep else leaf.clone()
    own = piece_of(leaf.gathered(), leaf.cut, wire.rank)
    return ShardPropagatingTensor.of(own if keep else own.clone(), leaf.cut, wire, origins=leaf.origins)


def _apart(mine: Any, expected: Tensor, whole: Tensor) -> str:
    """Describe how far a rank's value is from those of one process; return an empty string within rounding."""
    if mine.shape != expected.shape:
        return f"shape {list(mine.shape)} instead of {list(expected.shape)}"
    if not whole.is_floating_point():
        return "" if torch.equal(mine, expected) else "different values than one process"
    if not expected.numel() or expected.is_meta:
        return ""
    same = (mine == expected) | (mine.isnan() & expected.isnan())
    far = (mine.double() - expected.double()).abs().masked_fill(same, 0.0).max()
    size = whole.double().abs().masked_fill(~whole.isfinite(), 0.0).max().clamp(min=1e-30)
    most = 0.25 if whole.dtype in (torch.float16, torch.bfloat16) else 4096 * torch.finfo(whole.dtype).eps
    return (
        "" if far <= most * size else f"values that are {float(far / size):.1e} of its size from those of one process"
    )
