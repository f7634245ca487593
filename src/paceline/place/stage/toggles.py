"""What a forward sets on torch's own modules between their calls: a graph keeps the calls alone, not what is set."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from paceline.errors import LayoutError
from paceline.place.traceless import plain_state


class Toggles:
    """Looks at each call of a unit whether its modules stand as they did before the forward."""

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self._found = ""
        self._handles = [
            module.register_forward_pre_hook(self._watch(name, module))
            for name, module in model.named_modules()
            if name in units
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def refuse(self) -> None:
        """Refuse what was found.

        Raises:
            LayoutError: the first module and attribute.
        """
        if self._found:
            raise LayoutError(
                f"the forward sets self.{self._found} between calls of its modules, and stages along a graph make the "
                "calls alone.",
                cause="a pass in eval mode, without tracking or with another momentum within the training forward",
                hint="--layout ddp or fsdp, or a chain of blocks of which each is called once",
            )

    def _watch(self, name: str, unit: nn.Module) -> Callable[[nn.Module, Any], None]:
        before = _state(name, unit)

        def hook(_: nn.Module, __: Any) -> None:
            if not self._found and torch.is_grad_enabled():  # what runs under no_grad is kept operation by operation
                now = _state(name, unit)
                self._found = next((key for key in {**before, **now} if before.get(key) != now.get(key)), "")

        return hook


def _state(name: str, unit: nn.Module) -> dict[str, Any]:
    """The mode of each module in it, and the settings of torch's own."""
    parts = {f"{name}.{own}".rstrip("."): part for own, part in unit.named_modules()}
    known = {own: part for own, part in parts.items() if type(part).__module__.startswith("torch.nn.modules.")}
    return plain_state(known) | {f"{own}.training": part.training for own, part in parts.items()}
