"""Run modules with the role `local` (experts) on the shards of their parameters, and sum the outputs over the ranks."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.parallel.tensor_parallel.collectives import (
    TensorParallelGroup,
    copy_to_parallel_region,
    local_piece,
    reduce_from_parallel_region,
)
from paceline.parallel.tensor_parallel.logical.logical_group import LogicalGroup
from paceline.parallel.tensor_parallel.logical.logical_shards import LogicalShards
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor
from paceline.parallel.tensor_parallel.sharding import DimSharding
from paceline.torch_internals.private_api import tree_flatten, tree_unflatten
from paceline.torch_internals.rng import get_rng_states, set_rng_states


def register_local_hooks(
    module: nn.Module, name: str, shardings: Mapping[str, DimSharding], group: TensorParallelGroup
) -> Sequence[Any]:
    """Register hooks that sum the outputs and the input gradients of a module that runs on its shards.

    `shardings` contains the shardings of the module's parameters by their full names, which begin with `name`.
    """
    if isinstance(group, LogicalGroup):
        return [_LogicalForward(module, name, shardings, group)]

    def pre_hook(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return _map_tensors((args, kwargs), lambda x: _read_full(x, group))

    def post_hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        return _map_tensors(output, lambda x: reduce_from_parallel_region(x, group) if x.is_floating_point() else x)

    return [
        module.register_forward_pre_hook(pre_hook, with_kwargs=True),
        module.register_forward_hook(post_hook, with_kwargs=True),
    ]


class _LogicalForward:
    """A replacement for a module's forward, which runs it once for each logical shard of its parameters.

    Each run starts with the same states of the random generators.
    """

    def __init__(self, module: nn.Module, name: str, shardings: Mapping[str, DimSharding], group: LogicalGroup) -> None:
        self._module, self._group = module, group
        self._forward: Callable[..., Any] = module.forward
        self._parameters = [
            (submodule, key, shardings[f"{name}.{path}.{key}" if path else f"{name}.{key}"])
            for path, submodule in module.named_modules()
            for key, _ in submodule.named_parameters(recurse=False)
        ]
        module.forward = self.run

    def remove(self) -> None:
        """Restore the module's forward."""
        self._module.__dict__.pop("forward", None)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward for each logical shard, and sum the outputs over all logical ranks."""
        group = self._group
        inputs = _map_tensors((args, kwargs), lambda x: _read_full(x, group))
        pieces = [
            (submodule, key, local_piece(submodule._parameters[key], sharding, group))
            for submodule, key, sharding in self._parameters
        ]
        states, outputs = get_rng_states(), []
        for index in range(group.ranks_per_process):
            if index:
                set_rng_states(states)
            outputs.append(self._run_shard(index, inputs, pieces))
        leaves = [tree_flatten(output)[0] for output in outputs]
        totals = [
            reduce_from_parallel_region(LogicalShards.from_shards(terms), group)
            if isinstance(terms[0], Tensor) and terms[0].is_floating_point()
            else terms[0]
            for terms in zip(*leaves, strict=True)
        ]
        return tree_unflatten(totals, tree_flatten(outputs[0])[1])

    def _run_shard(self, index: int, inputs: Any, pieces: Sequence[tuple[nn.Module, str, Tensor]]) -> Any:
        args, kwargs = _map_tensors(inputs, lambda x: x.shards[index] if isinstance(x, LogicalShards) else x)
        for submodule, key, piece in pieces:
            assert isinstance(piece, LogicalShards)
            submodule.__dict__[key] = piece.shards[index]
        try:
            return self._forward(*args, **kwargs)
        finally:
            for submodule, key, _ in pieces:
                submodule.__dict__.pop(key, None)


def _read_full(x: Tensor, group: TensorParallelGroup) -> Tensor:
    """Return the full tensor of an input of a module that runs on its shards."""
    return (
        x.full_tensor(has_partial_grad=True)
        if isinstance(x, ShardPropagatingTensor)
        else copy_to_parallel_region(x, group)
    )


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    leaves, spec = tree_flatten(value)
    return tree_unflatten([function(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)
