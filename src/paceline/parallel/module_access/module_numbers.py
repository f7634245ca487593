"""Find the numbers among the attributes of a model's modules; save, restore, encode and decode them."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.module_access.installed_hooks import Hook, find_new_handles, find_new_hooks, remove_hooks
from paceline.torch_internals.private_api import next_hook_id

_TORCH_ATTRIBUTES = frozenset({"_is_full_backward_hook"})
_NUMBER_TYPES: tuple[type, ...] = (type(None), bool, int, float)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_MAX_INTEGER = 2**53  # float64 can't represent all larger integers
MISSING = "missing"
WIDTH = 2  # the numbers that encode one attribute: its type and its value

Number = None | bool | int | float | tuple[int, float]
"""The value of an attribute; for a zero-dimensional tensor, the index of its dtype in `_DTYPES` and its value."""


class ModuleNumbers:
    """The attributes of `model`'s modules that are numbers, None, or tensors of one number in CPU memory.

    Attributes that a forward adds are included. An attribute is named by its module's FQN and its own name.
    `ignored` returns the names of the attributes of a module that are left out.

    `snapshot` saves all values; `restore` restores them. Some forwards install hooks in their first call, and remember
    that in a flag (`self.is_ready = True`) or in the handle of a hook. If `restore` resets such an attribute, it also
    removes the hooks, because the next forward installs them again.
    """

    def __init__(self, model: nn.Module, *, ignored: Callable[[nn.Module], Container[str]] = lambda _: ()) -> None:
        self._modules = {f"{name}.".lstrip("."): vars(module) for name, module in model.named_modules()}
        self._ignored = {f"{name}.".lstrip("."): ignored(module) for name, module in model.named_modules()}
        self._attribute_counts: list[int] = []
        self._locations: dict[str, tuple[dict[str, Any], str]] = {}
        self._saved_objects: dict[str, Any] = {}
        self._saved_tensor_values: dict[str, Number | str] = {}
        self._model = model
        self._hook_number = 0
        self._contents: dict[str, frozenset[str]] = {}  # by module; see `_attribute_names`
        self._saved_contents = self._contents
        self.snapshot()

    def snapshot(self) -> None:
        """Save the current values."""
        self._find_numbers()
        self._saved_objects = {
            name: attributes.get(key, MISSING) for name, (attributes, key) in self._locations.items()
        }
        self._saved_tensor_values = {
            n: _as_number(value) for n, value in self._saved_objects.items() if type(value) is Tensor
        }
        self._hook_number, self._saved_contents = next_hook_id(), self._contents

    def restore(self) -> None:
        """Restore the saved values, and remove attributes that were added since."""
        hooks = self._restore_handles()
        for name in self.changed_names():
            if self._is_newly_set_flag(name):
                hooks += self._new_hooks_of_module(name)
            if name in self._saved_tensor_values:  # other modules may hold the same tensor
                attributes, key = self._locations[name]
                attributes[key] = self._saved_objects[name]
            self.set_value(name, self.saved_value(name))
        remove_hooks(hooks)

    def is_install_flag(self, name: str) -> bool:
        """Return whether this attribute is a flag with which a forward remembers that it has installed something.

        That is: since `snapshot`, the flag became True, and the module got new hooks, buffers or objects. Such a flag
        must not be copied to a rank that has not installed these objects.
        """
        if not self._is_newly_set_flag(name):
            return False
        attributes, saved_contents = self._modules[_module_of(name)], self._saved_contents[_module_of(name)]
        added_names = _attribute_names(attributes) - saved_contents
        has_object = any(_as_number(attributes.get(added_name, MISSING)) == MISSING for added_name in added_names)
        return has_object or bool(self._new_hooks_of_module(name))

    def changed_names(self) -> list[str]:
        """Return the names of the attributes that are new or whose number differs from the saved number."""
        self._find_numbers()
        saved_objects = self._saved_objects
        candidates = [  # a number that is the same object has not changed
            name
            for name, (attributes, key) in self._locations.items()
            if attributes.get(key, MISSING) is not saved_objects.get(name, MISSING) or name in self._saved_tensor_values
        ]
        return [
            name
            for name in candidates
            if self.current_value(name) != MISSING
            and not _is_same_number(self.saved_value(name), self.current_value(name))
        ]

    def saved_value(self, name: str) -> Number | str:
        """Return the saved value of an attribute, `MISSING` if it did not exist."""
        return (
            self._saved_tensor_values[name]
            if name in self._saved_tensor_values
            else _as_number(self._saved_objects.get(name, MISSING))
        )

    def current_value(self, name: str) -> Number | str:
        """Return the value of an attribute, `MISSING` if it does not exist or is not a number."""
        attributes, attribute = self._locations[name] if name in self._locations else self._locate(name)
        return _as_number(attributes.get(attribute, MISSING))

    def set_value(self, name: str, value: Number | str) -> None:
        """Set an attribute; `MISSING` removes it."""
        attributes, attribute = self._locate(name)
        current = attributes.get(attribute)
        if value == MISSING:
            attributes.pop(attribute, None)
        elif isinstance(value, tuple) and type(current) is Tensor and current.dtype == _DTYPES[value[0]]:
            current.data.fill_(value[1])
        elif isinstance(value, tuple):
            attributes[attribute] = torch.tensor(value[1], dtype=_DTYPES[value[0]])
        else:
            attributes[attribute] = value

    def encode(self, names: Sequence[str]) -> list[float]:
        """Return `WIDTH` numbers for each attribute, exact in float64: its type (-1 if it is missing) and its value."""
        encoded: list[float] = []
        for value in map(self.current_value, names):
            if isinstance(value, tuple):
                encoded += [float(len(_NUMBER_TYPES) + value[0]), value[1]]
            elif isinstance(value, str):
                encoded += [-1.0, 0.0]
            else:
                type_index = next(index for index, kind in enumerate(_NUMBER_TYPES) if isinstance(value, kind))
                encoded += [float(type_index), float(value or 0)]
        return encoded

    def decode(self, names: Sequence[str], values: Sequence[float]) -> None:
        """Set the values that another rank's `encode` returned for the same names."""
        for index, name in enumerate(names):
            type_index, value = int(values[index * WIDTH]), values[index * WIDTH + 1]
            if type_index >= len(_NUMBER_TYPES):
                self.set_value(name, (type_index - len(_NUMBER_TYPES), value))
            elif type_index >= 0:
                self.set_value(name, None if type_index == 0 else _NUMBER_TYPES[type_index](value))

    def _find_numbers(self) -> None:
        """Find the attributes that are numbers; search again only if a module has more or fewer attributes."""
        sizes = [_count_attributes(attributes) for attributes in self._modules.values()]
        if sizes != self._attribute_counts:
            self._attribute_counts = sizes
            self._contents = {module: _attribute_names(attributes) for module, attributes in self._modules.items()}
            locations = {
                f"{module}{name}": (attributes, name)
                for module, attributes in self._modules.items()
                for name, value in attributes.items()
                if name not in _TORCH_ATTRIBUTES and name not in self._ignored[module] and _as_number(value) != MISSING
            }
            self._locations = {**self._locations, **locations}

    def _is_newly_set_flag(self, name: str) -> bool:
        """Return whether the attribute is a flag that was set since `snapshot`; `training` is no such flag."""
        is_mode = name.rpartition(".")[2] == "training"
        return not is_mode and self.current_value(name) is True and self.saved_value(name) in (MISSING, False)

    def _restore_handles(self) -> list[Hook]:
        """Restore attributes that now hold the handle of a new hook instead of None, and return those hooks."""
        hooks, hook_numbers = find_new_hooks(self._model, since=self._hook_number), set[int]()
        for name, number in [*find_new_handles(self._modules, since=self._hook_number)] if hooks else []:
            if self.saved_value(name) in (MISSING, None):
                self.set_value(name, self.saved_value(name))
                hook_numbers.add(number)
        return [(table, number) for table, number in hooks if number in hook_numbers]

    def _new_hooks_of_module(self, flag: str) -> list[Hook]:
        """Return the hooks that were registered on the attribute's module or its submodules since `snapshot`."""
        return find_new_hooks(self._model, since=self._hook_number, prefix=_module_of(flag))

    def _locate(self, name: str) -> tuple[dict[str, Any], str]:
        module, _, attribute = name.rpartition(".")
        return self._modules[f"{module}.".lstrip(".")], attribute


_REGISTRIES = ("_parameters", "_buffers", "_modules")


def _module_of(name: str) -> str:
    """Return the FQN of an attribute's module, with a dot; empty for the model itself."""
    return f"{name.rpartition('.')[0]}.".lstrip(".")


def _count_attributes(attributes: Mapping[str, Any]) -> int:
    return len(attributes) + sum(len(attributes.get(key, ())) for key in _REGISTRIES)


def _attribute_names(attributes: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of a module's attributes, parameters, buffers and submodules."""
    return frozenset(attributes).union(*(attributes.get(key, ()) for key in _REGISTRIES))


def _as_number(value: Any) -> Number | str:
    if type(value) in _NUMBER_TYPES:  # a subclass, such as an IntEnum, is more than its number
        return value if not isinstance(value, int) or abs(value) <= _MAX_INTEGER else MISSING
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in _DTYPES and type(value) is Tensor:
        is_plain = value.device.type == "cpu" and not value.requires_grad
        return (_DTYPES.index(value.dtype), float(value)) if is_plain else MISSING
    return MISSING


def _is_same_number(old: Number | str, new: Number | str) -> bool:
    return old is new or (type(old) is type(new) and (old == new or (old != old and new != new)))
