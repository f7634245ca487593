"""Exposure of plain local shards to module hooks that do not know sharded tensors."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from paceline.parallel.tensor_parallel.sharded_tensor import ShardPropagatingTensor
from paceline.torch_internals.private_api import tree_flatten, tree_unflatten


@contextmanager
def expose_local_shards(module: nn.Module) -> Iterator[None]:
    """Let hooks that are registered inside this context see each rank's plain shards.

    Register pre-hooks with `prepend=True`. A tensor that a hook returns in a shard's place gets the shard's
    sharding. So `fully_shard` gathers before a sharded activation is read and frees after its gradient has arrived: its
    identities and hooks are on the plain shard, which autograd knows.
    """
    given, made = _Laid(), _Laid()
    module.register_forward_pre_hook(given.cut_again, prepend=True, with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: made.pieces(output))
    yield
    module.register_forward_pre_hook(given.as_pieces, prepend=True, with_kwargs=True)
    module.register_forward_hook(lambda _, __, output: made.put_back(output))


class _Laid:
    """The sharded tensors of one call, by position among its values, kept from before the hooks until after them."""

    def __init__(self) -> None:
        self._cut: dict[int, ShardPropagatingTensor] = {}

    def as_pieces(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Expose the plain shards; runs as a pre-hook."""
        return self.pieces((args, kwargs))

    def cut_again(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Restore the sharded tensors; runs as a pre-hook, after the others."""
        return self.put_back((args, kwargs))

    def pieces(self, values: Any) -> Any:
        """Return the values with plain shards, or None if nothing is sharded; hooks treat None as no change."""
        leaves, shape = tree_flatten(values)
        self._cut = {place: leaf for place, leaf in enumerate(leaves) if isinstance(leaf, ShardPropagatingTensor)}
        return self._changed(leaves, shape, lambda split, _: split.local)

    def put_back(self, values: Any) -> Any:
        """Wrap the tensors that are now in the shards' places with the original sharding."""
        if not self._cut:
            return None
        leaves, shape = tree_flatten(values)
        found = self._changed(
            leaves, shape, lambda cut, now: ShardPropagatingTensor.of(now, cut.cut, cut.wire, origins=cut.origins)
        )
        self._cut = {}
        return found

    def _changed(
        self, leaves: list[Any], shape: Any, change: Callable[[ShardPropagatingTensor, Tensor], Tensor]
    ) -> Any:
        if not self._cut:
            return None
        now = [change(self._cut[n], leaf) if n in self._cut else leaf for n, leaf in enumerate(leaves)]
        return tree_unflatten(now, shape)
