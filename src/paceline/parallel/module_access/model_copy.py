"""A deep copy of a user's model, also where a forward has left something in it."""

import copy
from collections.abc import Iterable

from torch import Tensor, nn

from paceline.torch_internals.pytree import tensor_leaves


def copy_model(model: nn.Module, *, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Return a deep copy that has the `shared` tensors themselves.

    A module may keep a tensor of its last forward (`self.aux_loss = ...`). It hangs in a graph, and torch refuses to
    copy it; the copy has its value.
    """
    memo = {id(tensor): tensor for tensor in shared}
    for module in model.modules():
        for value in vars(module).values():
            memo.update({id(tensor): tensor.detach().clone() for tensor in tensor_leaves(value) if not tensor.is_leaf})
    return copy.deepcopy(model, memo)
