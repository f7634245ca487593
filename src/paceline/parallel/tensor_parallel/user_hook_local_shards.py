"""Give plain local shards to module hooks that do not support sharded tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

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
        return self._map_sharded(leaves, spec, lambda sharded, _: sharded.local)

    def restore(self, values: Any) -> Any:
        """Wrap the tensors at the positions of the shards with the original sharding."""
        if not self._sharded:
            return None
        leaves, spec = tree_flatten(values)
        restored = self._map_sharded(
            leaves,
            spec,
            lambda sharded, local: ShardPropagatingTensor.from_local(
                local, sharded.sharding, sharded.group, origins=sharded.origins
            ),
        )
        self._sharded = {}
        return restored

    def _map_sharded(
        self, leaves: list[Any], spec: Any, change: Callable[[ShardPropagatingTensor, Tensor], Tensor]
    ) -> Any:
        if not self._sharded:
            return None
        new_leaves = [change(self._sharded[n], leaf) if n in self._sharded else leaf for n, leaf in enumerate(leaves)]
        return tree_unflatten(new_leaves, spec)
