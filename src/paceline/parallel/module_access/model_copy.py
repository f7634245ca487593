"""Deep-copy a user's model, also if its modules store tensors of a forward."""

import copy
from collections.abc import Iterable

from torch import Tensor, nn

from paceline.torch_internals.pytree import tensor_leaves


def copy_model(model: nn.Module, *, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Return a deep copy of the model that refers to the `shared` tensors instead of copying them.

    A module may store a tensor of its last forward (`self.aux_loss = ...`). torch refuses to deep-copy such a non-leaf
    tensor; the copy of the model gets a detached clone.
    """
    memo = {id(tensor): tensor for tensor in shared}
    for module in model.modules():
        for value in vars(module).values():
            memo.update({id(tensor): tensor.detach().clone() for tensor in tensor_leaves(value) if not tensor.is_leaf})
    return copy.deepcopy(model, memo)
