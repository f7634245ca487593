"""Each use of a tied weight, apart: what exact mode adds is one summand a use, wherever the uses run.

In one process autograd would add the gradients of both uses in floats before anybody sees them; the stages of a
pipeline see one each. So while a module runs, a weight that has several names is shown to it as a view of its own,
whose gradient is kept here, and zeros go on to the weight itself: its hook still says when all have come.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError


class TiedUses:
    """Of one model. `names` are the weights that have several, by their first one."""

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
        """From now on; after all that looks at which module reads which parameter."""
        for name, module, own in self._places:
            self._handles += [
                module.register_forward_pre_hook(partial(self._show, name=name, own=own)),
                module.register_forward_hook(partial(_hide, own=own), always_call=True),
            ]

    def forget(self) -> None:
        """What a step left that was not finished."""
        self._apart.clear()

    def summands(self, name: str, rest: Tensor) -> list[Tensor]:
        """What has come of a weight; `rest` is the gradient of what read it outside of the modules that hold it.

        Raises:
            LayoutError: there is such a one, of a weight that crosses stages: it could be the sum of several.
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
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _hide(module: nn.Module, *_: Any, own: str) -> None:
    module.__dict__.pop(own, None)
