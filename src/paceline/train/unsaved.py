"""What an optimizer keeps in attributes of its own and moves as it steps: no checkpoint has it."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

_SAVED = ("state", "param_groups", "defaults")
_TORCH = ("_step_count", "_numel_cache")  # written by torch, to warn or to be faster
_Leaf = tuple[Callable[[], Any], int | float | complex]


class Unsaved:
    """The optimizers' attributes as they were when this was made."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._before = [_attributes(optimizer) for optimizer in optimizers]
        self._told = False

    def note(self) -> str:
        """What has changed since, once; empty where nothing has."""
        names = [
            f"{type(optimizer).__name__}.{name}"
            for optimizer, before in zip(self._optimizers, self._before, strict=True)
            for name, now in _attributes(optimizer).items()
            if not _same(before.get(name, []), now)
        ]
        if self._told or not names:
            return ""
        self._told = True
        return (
            f"no checkpoint has {', '.join(names)}, and a run that goes on from one starts with what optimizer= makes: "
            "what counts belongs in self.state[p] or a parameter group"
        )


def _attributes(optimizer: Optimizer) -> dict[str, list[_Leaf]]:
    own = {name: value for name, value in vars(optimizer).items() if name not in (*_SAVED, *_TORCH)}
    return {name: list(_leaves(value, optimizer)) for name, value in own.items()}


def _leaves(value: Any, owner: Optimizer) -> Iterator[_Leaf]:
    """Its tensors, each with the count of writes to it, and its numbers; the model's parameters are saved as such."""
    if isinstance(value, nn.Parameter):
        return
    if isinstance(value, Tensor):
        yield weakref.ref(value), 0 if value.is_inference() else value._version
    elif isinstance(value, int | float | complex) and not isinstance(value, bool):
        yield _nothing, value
    elif isinstance(value, Optimizer):
        shared = value.state is owner.state
        inner = {k: v for k, v in vars(value).items() if k not in (*_SAVED, *_TORCH)}
        yield from _leaves([*inner.values(), {} if shared else [*value.state.values()]], owner)
    elif isinstance(value, Mapping):
        yield from _leaves([*value.values()], owner)
    elif isinstance(value, list | tuple | set):
        for item in value:
            yield from _leaves(item, owner)


def _nothing() -> None:
    """In the place of a number's tensor."""


def _same(before: Sequence[_Leaf], now: Sequence[_Leaf]) -> bool:
    return len(before) == len(now) and all(
        one() is other() and count == number for (one, count), (other, number) in zip(before, now, strict=True)
    )
