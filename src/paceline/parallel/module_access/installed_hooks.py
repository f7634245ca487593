"""Find and remove hooks that a forward installs once, in its first call.

The module remembers in a flag (`self.is_ready = True`) or in the handle of a hook that its hooks are installed. Before
a step is rerun, this attribute is restored. The hooks must then be removed too, or the forward installs them twice.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from paceline.torch_internals.private_api import hook_dicts

Hook = tuple[dict[int, Callable[..., Any]], int]
"""The table that contains the hook, and the hook's number in it."""


def find_new_hooks(model: nn.Module, *, since: int, prefix: str = "") -> list[Hook]:
    """Return the hooks of a module and its submodules with numbers from `since` on, without Paceline's own hooks.

    `prefix` is the module's FQN followed by a dot; it is empty for the model itself.
    """
    if RemovableHandle.next_id == since:  # no hook was registered since then
        return []
    return [
        (table, number)
        for name, module in model.named_modules()
        if f"{name}.".lstrip(".").startswith(prefix)
        for table in hook_dicts(module)
        for number, hook in table.items()
        if number >= since and not str(getattr(hook, "__module__", "")).startswith("paceline.")
    ]


def find_new_handles(attributes_by_module: Mapping[str, dict[str, Any]], *, since: int) -> Iterator[tuple[str, int]]:
    """Find the attributes that hold the handle of a hook whose number is `since` or higher.

    Yield the attribute's name and the hook's number. `attributes_by_module` maps each module's FQN, followed by a dot,
    to its attributes.
    """
    for prefix, attributes in attributes_by_module.items():
        for key, value in attributes.items():
            if isinstance(value, RemovableHandle) and value.id >= since:
                yield f"{prefix}{key}", value.id


def remove_hooks(hooks: list[Hook]) -> None:
    """Remove hooks. A hook on a tied parameter is listed once for each module that has the parameter."""
    for table, number in hooks:
        table.pop(number, None)
