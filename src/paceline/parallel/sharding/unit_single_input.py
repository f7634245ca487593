"""Units of fsdp that leave the order of sums alone, as exact mode wants it.

`fully_shard` puts one identity before a unit, through which the gradients of all its inputs go. What several units
read (an encoder's output, a position bias) then gets its gradient unit by unit, where one process adds use by use: in
floats that is another sum. Here the identity is given the first input alone. The rest of the unit runs backward before
it all the same, since autograd does first what was done last.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch_internals.private_api import tree_flatten, tree_unflatten


@contextmanager
def one_input(module: nn.Module) -> Iterator[None]:
    """A pre-hook that is put in front of the module's others inside sees one input that has a gradient."""
    past = _Past()
    module.register_forward_pre_hook(past.put_back, prepend=True, with_kwargs=True)
    yield
    module.register_forward_pre_hook(past.take, prepend=True, with_kwargs=True)


class _Past:
    """The other inputs of one call, by their places, while the hook runs."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    def take(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """As a pre-hook."""
        leaves, shape = tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._held = {n: leaves[n] for n in places[1:]} if torch.is_grad_enabled() else {}
        if not self._held:
            return None
        return tree_unflatten([leaf.detach() if n in self._held else leaf for n, leaf in enumerate(leaves)], shape)

    def put_back(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """As a pre-hook, after it; in the type that it was cast to."""
        if not self._held:
            return None
        leaves, shape = tree_flatten((args, kwargs))
        held, self._held = self._held, {}
        return tree_unflatten([held[n].to(leaf.dtype) if n in held else leaf for n, leaf in enumerate(leaves)], shape)
