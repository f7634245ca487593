"""FSDP units that keep the order of gradient sums, as exact mode requires.

`fully_shard` puts one identity function before a unit, through which the gradients of all its inputs pass. A tensor
that several units read (an encoder's output, a position bias) then gets its gradient unit by unit, while one process
adds use by use: in floating point the sums differ. Here the identity receives only the first input. The rest of the
unit still runs backward before it, since autograd runs later operations first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch_internals.private_api import tree_flatten, tree_unflatten


@contextmanager
def one_input(module: nn.Module) -> Iterator[None]:
    """Show only one differentiable input to a pre-hook that the body of the `with` prepends to the module's hooks."""
    past = _Past()
    module.register_forward_pre_hook(past.put_back, prepend=True, with_kwargs=True)
    yield
    module.register_forward_pre_hook(past.take, prepend=True, with_kwargs=True)


class _Past:
    """The other differentiable inputs of one call, by position, held while the hook runs."""

    def __init__(self) -> None:
        self._held: dict[int, Tensor] = {}

    def take(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Detach all differentiable inputs but the first; a forward pre-hook."""
        leaves, shape = tree_flatten((args, kwargs))
        places = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._held = {n: leaves[n] for n in places[1:]} if torch.is_grad_enabled() else {}
        if not self._held:
            return None
        return tree_unflatten([leaf.detach() if n in self._held else leaf for n, leaf in enumerate(leaves)], shape)

    def put_back(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Restore the held inputs in the dtype that `fully_shard` cast to; a forward pre-hook that runs after its."""
        if not self._held:
            return None
        leaves, shape = tree_flatten((args, kwargs))
        held, self._held = self._held, {}
        return tree_unflatten([held[n].to(leaf.dtype) if n in held else leaf for n, leaf in enumerate(leaves)], shape)
