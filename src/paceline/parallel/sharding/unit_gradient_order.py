"""Keep the order in which gradients are summed in FSDP units, as exact mode requires.

`fully_shard` passes all inputs of a unit through one identity function. In backward, the function waits for the
gradients of all inputs. A tensor that several units read (an encoder's output, a position bias) then gets one gradient
per unit, while in one process it gets one per use. In floating point these sums differ. Here only the first input
passes through the identity function. The backward of this function still runs after the unit's backward, since autograd
runs later operations first.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.torch_internals.private_api import tree_flatten, tree_unflatten


@contextmanager
def keep_gradient_order(module: nn.Module) -> Iterator[None]:
    """Keep the order of gradient sums although the `with` body registers a forward pre-hook on the module.

    Of the differentiable inputs, only the first passes through this hook. The hook gets the others detached, and the
    module then gets the original tensors.
    """
    detached_inputs = _DetachedInputs()
    module.register_forward_pre_hook(detached_inputs.restore, prepend=True, with_kwargs=True)
    yield
    module.register_forward_pre_hook(detached_inputs.detach, prepend=True, with_kwargs=True)


class _DetachedInputs:
    """The differentiable inputs of one call except the first, by position, stored while the registered hook runs."""

    def __init__(self) -> None:
        self._inputs: dict[int, Tensor] = {}

    def detach(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Detach all differentiable inputs but the first; a forward pre-hook."""
        leaves, structure = tree_flatten((args, kwargs))
        positions = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._inputs = {n: leaves[n] for n in positions[1:]} if torch.is_grad_enabled() else {}
        if not self._inputs:
            return None
        return tree_unflatten(
            [leaf.detach() if n in self._inputs else leaf for n, leaf in enumerate(leaves)], structure
        )

    def restore(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Restore the stored inputs, in the dtype to which `fully_shard` has cast them; a forward pre-hook."""
        if not self._inputs:
            return None
        leaves, structure = tree_flatten((args, kwargs))
        inputs, self._inputs = self._inputs, {}
        return tree_unflatten(
            [inputs[n].to(leaf.dtype) if n in inputs else leaf for n, leaf in enumerate(leaves)], structure
        )
