"""Record a separate gradient for each use of a tied weight, so that exact mode adds the same terms in every layout.

In one process, autograd sums the gradients of all uses in floating point. A pipeline stage sees only its own uses. So
while a module runs, a view replaces each of its tied weights. The gradient of the view is stored here, and the weight
itself gets zeros, so that its gradient hook still reports when all gradients are ready.
"""

from collections import Counter
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError


class TiedUses:
    """The uses of a model's tied weights.

    `names` are the first names of the tied weights. `multi_stage_names` are the names of weights that several pipeline
    stages hold.
    """

    def __init__(self, model: nn.Module) -> None:
        first_names = {id(p): name for name, p in model.named_parameters()}
        locations: dict[str, list[tuple[nn.Module, str]]] = {}
        for module in model.modules():
            for attribute, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                locations.setdefault(first_names[id(parameter)], []).append((module, attribute))
        counts = Counter(first_names[id(p)] for _, p in model.named_parameters(remove_duplicate=False))
        self.names = frozenset(name for name, count in counts.items() if count > 1)
        self._locations = [(name, *location) for name in self.names for location in locations[name]]
        self._use_gradients: dict[str, list[Tensor]] = {}
        self._replaced: dict[tuple[int, str], list[Any]] = {}
        self._handles: list[Any] = []
        self.multi_stage_names: Collection[str] = ()

    def register_hooks(self) -> None:
        """Register the hooks; call this after all code that inspects which module reads which parameter."""
        for name, module, attribute in self._locations:
            self._handles += [
                module.register_forward_pre_hook(partial(self._insert_view, name=name, attribute=attribute)),
                module.register_forward_hook(
                    partial(self._remove_view, attribute=attribute), always_call=True, prepend=True
                ),
            ]

    def clear_gradients(self) -> None:
        """Drop the gradients of an unfinished step."""
        self._use_gradients.clear()
        self._replaced.clear()

    def gradients_by_use(self, name: str, outside_gradient: Tensor) -> list[Tensor]:
        """Return a weight's gradients, one per use.

        `outside_gradient` is the gradient of reads outside the modules that hold the weight.

        Raises:
            LayoutError: a weight on several stages has such reads, whose gradients can't be separated.
        """
        gradients = self._use_gradients.pop(name, [])
        if not gradients or bool(outside_gradient.any()):
            if gradients and name in self.multi_stage_names:
                raise LayoutError(
                    f"exact mode with pp: {name} is read on several stages, and by a module that does not hold it.",
                    cause="one process adds the gradients of such reads before they are rounded to the grid",
                    hint="tie it to a parameter of the module that reads it (head.weight = embed.weight), or leave "
                    "--train.exact out",
                )
            gradients.append(outside_gradient)
        return gradients

    def _insert_view(self, module: nn.Module, _: Any, *, name: str, attribute: str) -> None:
        """Replace a weight by a view for one call of a module, and store the gradient of the view.

        If tensor parallelism has replaced the weight by a sharded tensor, the view gets the same sharding.
        """
        parameter, current = module._parameters[attribute], module.__dict__.get(attribute)
        self._replaced.setdefault((id(module), attribute), []).append(current)
        if parameter is None or not (parameter.requires_grad and torch.is_grad_enabled()):
            return
        use = parameter.view_as(parameter)
        use.register_hook(partial(self._store_gradient, name))
        replaced_with_view = getattr(current, "with_parameter", None)
        module.__dict__[attribute] = use if replaced_with_view is None else replaced_with_view(use)

    def _remove_view(self, module: nn.Module, *_: Any, attribute: str) -> None:
        """Put back what was in the weight's place before the call."""
        stack = self._replaced.get((id(module), attribute), [])
        previous = stack.pop() if stack else None
        if previous is None:
            module.__dict__.pop(attribute, None)
        else:
            module.__dict__[attribute] = previous

    def _store_gradient(self, name: str, gradient: Tensor) -> Tensor:
        self._use_gradients.setdefault(name, []).append(gradient)
        return gradient.new_zeros(()).expand(gradient.shape)

    def close(self) -> None:
        """Remove the module hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
