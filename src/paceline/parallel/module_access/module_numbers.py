"""Python numbers among the attributes of a model's modules, such as a momentum that decays or a count of calls.

A forward may change them as it changes a buffer, and no `state_dict` has them.
"""

from collections.abc import Callable, Container, Sequence
from typing import Any

from torch import nn

_TORCHS = frozenset({"training", "_is_full_backward_hook"})
_KINDS: tuple[type, ...] = (type(None), bool, int, float)
_LARGEST = 2**53  # float64 can't hold all larger integers
WIDTH = 2


class ModuleNumbers:
    """The attributes of `model`'s modules that are numbers or None now; attributes added later are not included.

    `keep` remembers them, `put_back` restores them. `moved` and `take` carry those that have changed since to a model
    built alike: a value that differs between ranks, such as a rank, stays each rank's own while no forward changes
    it. `but` gives the attributes of a module to ignore.
    """

    def __init__(self, model: nn.Module, *, but: Callable[[nn.Module], Container[str]] = lambda _: ()) -> None:
        self._places = [
            (vars(module), name)
            for module, left_alone in ((module, but(module)) for module in model.modules())
            for name, value in vars(module).items()
            if name not in _TORCHS and name not in left_alone and isinstance(value, _KINDS)
        ]
        self._kept: list[Any] = []
        self._has_moved: set[int] = set()
        self.keep()

    def __len__(self) -> int:
        return len(self._places)

    def keep(self) -> None:
        """Remember the current values; none counts as changed."""
        self._kept = self._now()
        self._has_moved.clear()

    def put_back(self) -> None:
        """Restore the remembered values."""
        for index in self._changed():
            attributes, name = self._places[index]
            attributes[name] = self._kept[index]
        self._has_moved.clear()

    def moved(self) -> list[float]:
        """Return `WIDTH` numbers for each attribute, which float64 holds exactly: its type and its value.

        The type is -1 for an attribute that has not changed.
        """
        self._has_moved.update(self._changed())
        found = [-1.0, 0.0] * len(self)
        for index in self._has_moved:
            attributes, name = self._places[index]
            value = attributes.get(name)
            if _is_number(value):
                kind = next(place for place, kind in enumerate(_KINDS) if isinstance(value, kind))
                found[index * WIDTH : (index + 1) * WIDTH] = [float(kind), float(value or 0)]
        return found

    def take(self, moved: Sequence[float]) -> None:
        """Set the values that another rank's `moved` returned."""
        for index, (attributes, name) in enumerate(self._places):
            kind, value = moved[index * WIDTH : (index + 1) * WIDTH]
            if kind >= 0:
                attributes[name] = None if kind == 0 else _KINDS[int(kind)](value)
                self._has_moved.add(index)

    def _now(self) -> list[Any]:
        return [attributes.get(name) for attributes, name in self._places]

    def _changed(self) -> list[int]:
        pairs = enumerate(zip(self._kept, self._now(), strict=True))
        return [index for index, (old, new) in pairs if not _same(old, new) and _is_number(new)]


def _same(old: Any, new: Any) -> bool:
    return old is new or (type(old) is type(new) and _is_number(new) and bool(old == new))


def _is_number(value: Any) -> bool:
    return isinstance(value, _KINDS) and (not isinstance(value, int) or abs(value) <= _LARGEST)
