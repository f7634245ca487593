"""A separate gradient for each use of a tied weight, so that exact mode adds the same terms in every layout.

In one process autograd sums the gradients of all uses in floating point, while each pipeline stage sees only its own
uses. So while a module runs, a tied weight is replaced by a view. The view's gradient is stored here, and the weight
itself gets zeros, so that its hook still reports when all gradients are ready.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError


class TiedUses:
    """The uses of a model's tied weights. `names` are the first names of the tied weights.

    `multi_stage_names` are those that several pipeline stages hold.
    """

    def __init__(self, model: nn.Module) -> None:
        first = {id(p): name for name, p in model.named_parameters()}
        places: dict[str, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for own, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(first[id(parameter)], []).append((module, own))
        count: dict[str, int] = {}
        for _, parameter in model.named_parameters(remove_duplicate=False):
            count[first[id(parameter)]] = count.get(first[id(parameter)], 0) + 1
        self.names = frozenset(name for name, number in count.items() if number > 1)
        self._places = [(name, *place) for name in self.names for place in places[name]]
        self._apart: dict[str, list[Tensor]] = {}
        self._handles: list[Any] = []
        self.crossing: Collection[str] = ()

    def watch(self) -> None:
        """Register the hooks; call this after all code that inspects which module reads which parameter."""
        for name, module, own in self._places:
            self._handles += [
                module.register_forward_pre_hook(partial(self._show, name=name, own=own)),
                module.register_forward_hook(partial(_hide, own=own), always_call=True),
            ]

    def forget(self) -> None:
        """Drop the gradients of an unfinished step."""
        self._apart.clear()

    def summands(self, name: str, rest: Tensor) -> list[Tensor]:
        """Return a weight's gradients, one per use.

        `outside_gradient` is the gradient of reads outside the modules that hold the weight.

        Raises:
            LayoutError: a weight on several stages has such reads, whose gradients can't be separated.
        """
        found = self._apart.pop(name, [])
        if not found or bool(rest.any()):
            if found and name in self.crossing:
                raise LayoutError(
                    f"exact mode with pp: {name} is read on several stages, and by a module that does not hold it.",
                    cause="one process adds the gradients of such reads before they are rounded to the grid",
                    hint="read it where it is a module's own (head.weight = embed.weight), or leave --train.exact out",
                )
            found.append(rest)
        return found

    def _show(self, module: nn.Module, _: Any, *, name: str, own: str) -> None:
        parameter = module._parameters[own]
        if parameter is None or not (parameter.requires_grad and torch.is_grad_enabled()):
            return
        use = parameter.view_as(parameter)
        use.register_hook(partial(self._keep, name))
        module.__dict__[own] = use

    def _keep(self, name: str, gradient: Tensor) -> Tensor:
        self._apart.setdefault(name, []).append(gradient)
        return gradient.new_zeros(()).expand(gradient.shape)

    def close(self) -> None:
        """Remove the module hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _hide(module: nn.Module, *_: Any, own: str) -> None:
    module.__dict__.pop(own, None)
