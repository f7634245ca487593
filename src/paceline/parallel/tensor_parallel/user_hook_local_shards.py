"""Give plain local shards to module hooks that do not support sharded tensors."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from torch import nn

from paceline.parallel.tensor_parallel.logical.logical_shards import LogicalShards
from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor
from paceline.torch_internals.private_api import tree_flatten, tree_unflatten


@contextmanager
def expose_local_shards(module: nn.Module) -> Iterator[None]:
    """Return a context; module hooks that are registered inside it get plain shards in place of sharded tensors.

    Register pre-hooks with `prepend=True`. If a hook returns another tensor in place of a shard, it is wrapped with the
    sharding of the shard. `fully_shard` needs this: it puts autograd hooks on activations, and autograd sees only
    plain shards.
    """
    inputs, outputs = _CallShards(), _CallShards()
    module.register_forward_pre_hook(inputs.restore_inputs, prepend=True, with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: outputs.expose(output))
    yield
    module.register_forward_pre_hook(inputs.expose_inputs, prepend=True, with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: outputs.restore(output))


class _CallShards:
    """The sharded tensors of one call, by position among its values, stored while the hooks run."""

    def __init__(self) -> None:
        self._sharded: dict[int, ShardPropagatingTensor] = {}
        self._spec: Any = None

    def expose_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace the sharded arguments by plain shards; a pre-hook that runs before the others."""
        return self.expose((args, kwargs))

    def restore_inputs(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Restore the sharded arguments; a pre-hook that runs after the others."""
        return self.restore((args, kwargs))

    def expose(self, values: Any) -> Any:
        """Return the values with plain shards, or None (no change, for a hook) if nothing is sharded."""
        leaves, spec = tree_flatten(values)
        self._sharded = {
            position: leaf for position, leaf in enumerate(leaves) if isinstance(leaf, ShardPropagatingTensor)
        }
        if not self._sharded:
            return None
        self._spec = spec
        exposed: list[Any] = [_plain_shards(leaf) if n in self._sharded else leaf for n, leaf in enumerate(leaves)]
        return tree_unflatten(exposed, spec)

    def restore(self, values: Any) -> Any:
        """Wrap the tensors at the positions of the shards with the original sharding."""
        if not self._sharded:
            return None
        values, spec = tree_flatten(values)
        leaves, restored = iter(values), list[Any]()
        for leaf in leaves:
            sharded = self._sharded.get(len(restored))
            if sharded is not None:
                leaf = _wrap_shards([leaf, *islice(leaves, _num_shards(sharded) - 1)], sharded)
            restored.append(leaf)
        has_logical_shards = any(isinstance(sharded.local, LogicalShards) for sharded in self._sharded.values())
        self._sharded = {}
        return tree_unflatten(restored, self._spec if has_logical_shards else spec)


def _plain_shards(sharded: ShardPropagatingTensor) -> Any:
    """Return the plain shard, or a list of the logical shards."""
    return list(sharded.local.shards) if isinstance(sharded.local, LogicalShards) else sharded.local


def _num_shards(sharded: ShardPropagatingTensor) -> int:
    return len(sharded.local.shards) if isinstance(sharded.local, LogicalShards) else 1


def _wrap_shards(shards: list[Any], sharded: ShardPropagatingTensor) -> ShardPropagatingTensor:
    """Wrap the shards with the sharding of `sharded`."""
    local = LogicalShards.from_shards(shards) if isinstance(sharded.local, LogicalShards) else shards[0]
    return ShardPropagatingTensor.from_local(local, sharded.sharding, sharded.group, origins=sharded.origins)
