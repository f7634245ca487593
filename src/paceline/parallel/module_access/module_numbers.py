"""Numbers among the attributes of a model's modules, such as a momentum that decays or a count of calls.

A forward may change them as it changes a buffer, and no `state_dict` has them.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_TORCHS = frozenset({"_is_full_backward_hook"})
_KINDS: tuple[type, ...] = (type(None), bool, int, float)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_LARGEST = 2**53  # float64 can't hold all larger integers
MISSING = "missing"
WIDTH = 2

Number = None | bool | int | float | tuple[int, float]
"""The value of an attribute; a tensor without dimensions is its dtype's index and its value."""


class ModuleNumbers:
    """The attributes of `model`'s modules that are numbers, None, or tensors of one number in CPU memory.

    Attributes that a forward adds are included. An attribute's name is its module's FQN and its own. `keep` remembers
    all, `put_back` restores them. `but` gives the attributes of a module to ignore.
    """

    def __init__(self, model: nn.Module, *, but: Callable[[nn.Module], Container[str]] = lambda _: ()) -> None:
        self._modules = {f"{name}.".lstrip("."): vars(module) for name, module in model.named_modules()}
        self._ignored = {f"{name}.".lstrip("."): but(module) for name, module in model.named_modules()}
        self._sizes: list[int] = []
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._objects: dict[str, Any] = {}
        self._of_tensors: dict[str, Number | str] = {}
        self.keep()

    def keep(self) -> None:
        """Remember the current values."""
        self._find()
        self._objects = {name: attributes.get(key, MISSING) for name, (attributes, key) in self._places.items()}
        self._of_tensors = {n: _number(value) for n, value in self._objects.items() if type(value) is Tensor}

    def put_back(self) -> None:
        """Restore the remembered values, and remove attributes that were added since."""
        for name in self.changed():
            if name in self._of_tensors:  # other modules may hold the same tensor
                attributes, key = self._places[name]
                attributes[key] = self._objects[name]
            self.assign(name, self.kept(name))

    def changed(self) -> list[str]:
        """Return the names of the attributes that are another number than remembered, or are new."""
        self._find()
        kept = self._objects
        others = [  # a number that is the same object has not changed
            name
            for name, (attributes, key) in self._places.items()
            if attributes.get(key, MISSING) is not kept.get(name, MISSING) or name in self._of_tensors
        ]
        return [name for name in others if self.value(name) != MISSING and not _same(self.kept(name), self.value(name))]

    def kept(self, name: str) -> Number | str:
        """Return the remembered value of an attribute, `MISSING` if there was none."""
        return self._of_tensors[name] if name in self._of_tensors else _number(self._objects.get(name, MISSING))

    def value(self, name: str) -> Number | str:
        """Return the value of an attribute, `MISSING` if there is none, or none that is a number."""
        attributes, attribute = self._places[name] if name in self._places else self._place(name)
        return _number(attributes.get(attribute, MISSING))

    def assign(self, name: str, value: Number | str) -> None:
        """Set an attribute; `MISSING` removes it."""
        attributes, attribute = self._place(name)
        now = attributes.get(attribute)
        if value == MISSING:
            attributes.pop(attribute, None)
        elif isinstance(value, tuple) and type(now) is Tensor and now.dtype == _DTYPES[value[0]]:
            now.data.fill_(value[1])
        elif isinstance(value, tuple):
            attributes[attribute] = torch.tensor(value[1], dtype=_DTYPES[value[0]])
        else:
            attributes[attribute] = value

    def encode(self, names: Sequence[str]) -> list[float]:
        """Return `WIDTH` numbers for each attribute, which float64 holds exactly: its type and its value.

        The type is -1 for an attribute that is missing.
        """
        found: list[float] = []
        for value in map(self.value, names):
            if isinstance(value, tuple):
                found += [float(len(_KINDS) + value[0]), value[1]]
            elif isinstance(value, str):
                found += [-1.0, 0.0]
            else:
                kind = next(place for place, kind in enumerate(_KINDS) if isinstance(value, kind))
                found += [float(kind), float(value or 0)]
        return found

    def decode(self, names: Sequence[str], values: Sequence[float]) -> None:
        """Set the values that another rank's `encode` returned for the same names."""
        for index, name in enumerate(names):
            kind, value = int(values[index * WIDTH]), values[index * WIDTH + 1]
            if kind >= len(_KINDS):
                self.assign(name, (kind - len(_KINDS), value))
            elif kind >= 0:
                self.assign(name, None if kind == 0 else _KINDS[kind](value))

    def _find(self) -> None:
        """List the attributes that are numbers, again if a module has got or lost one."""
        sizes = [len(attributes) for attributes in self._modules.values()]
        if sizes != self._sizes:
            self._sizes = sizes
            found = {
                f"{module}{name}": (attributes, name)
                for module, attributes in self._modules.items()
                for name, value in attributes.items()
                if name not in _TORCHS and name not in self._ignored[module] and _number(value) != MISSING
            }
            self._places = {**self._places, **found}

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
        module, _, attribute = name.rpartition(".")
        return self._modules[f"{module}.".lstrip(".")], attribute


def _number(value: Any) -> Number | str:
    if type(value) in _KINDS:  # a subclass, such as an IntEnum, is more than its number
        return value if not isinstance(value, int) or abs(value) <= _LARGEST else MISSING
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in _DTYPES and type(value) is Tensor:
        is_plain = value.device.type == "cpu" and not value.requires_grad
        return (_DTYPES.index(value.dtype), float(value)) if is_plain else MISSING
    return MISSING


def _same(old: Number | str, new: Number | str) -> bool:
    return old is new or (type(old) is type(new) and (old == new or (old != old and new != new)))
