"""Warnings about unsaved state: attributes of optimizer, model and loss that change and are in no checkpoint."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.process_group import World
from paceline.step.loss.modules_captured_by_loss import found_modules

_SAVED = ("state", "param_groups", "defaults")
_TORCH = ("_step_count", "_numel_cache")  # written by torch, to warn or to be faster
_PLACES = (
    "in the optimizer's state, self.state[p], or in a parameter group",
    "in a buffer of the model, self.register_buffer(name, tensor)",
)
_MODULE_S = frozenset(vars(nn.Module()))
_SEVERAL = (list, tuple, set, deque)
_Leaf = tuple[Callable[[], Any], Any]
_Leaves = dict[str, list[_Leaf]]


class UntrackedOptimizerState:
    """A record of attributes: of optimizers at creation, of modules at `begin`, after a run's first step.

    Objects that a first forward creates once (a cache, a mask) are no state: another run creates them again.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, model: nn.Module | None = None, loss: Any = None) -> None:
        self._optimizers = optimizers
        self._model = model
        own = {id(module) for module in model.modules()} if model is not None else set()
        self._loss = [pair for pair in found_modules(loss) if id(pair[1]) not in own]
        self._before = _of_optimizers(optimizers)
        self._begun: _Leaves | None = None
        self._told = False

    def begin(self) -> None:
        """Record the current attributes of the modules."""
        self._begun = self._of_modules()

    def note(self, world: World | None = None) -> str:
        """Return once which attributes changed on any rank, else an empty string. All ranks of `world` call this."""
        found = (
            [*_changed(self._before, _of_optimizers(self._optimizers))],
            [] if self._begun is None else [*_changed(self._begun, self._of_modules())],
        )
        told = [found] if world is None else world.gather_json(found)
        owned = [list(dict.fromkeys(name for each in told for name in each[owner])) for owner in range(len(found))]
        names = [name for each in owned for name in each]
        if self._told or not names:
            return ""
        self._told = True
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        places = [place for place, each in zip(_PLACES, owned, strict=True) if each]
        return (
            f"checkpoints do not contain {shown}, and a resumed run starts with the job's initial value: "
            f"keep it {', and '.join(places)}"
        )

    def _of_modules(self) -> _Leaves:
        found: _Leaves = {}
        for path, module in self._model.named_modules() if self._model is not None else ():
            found |= _of_module(path or type(module).__name__, module)
        for path, module in self._loss:
            found |= _of_module(path, module)
            found |= {f"{path}.{name}": [_leaf(tensor)] for name, tensor in module.named_buffers(recurse=False)}
        return found


def _of_module(path: str, module: nn.Module) -> _Leaves:
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        return {}
    own = {name: value for name, value in vars(module).items() if name not in _MODULE_S}
    return {f"{path}.{name}": list(_leaves(value, None)) for name, value in own.items()}


def _of_optimizers(optimizers: Sequence[Optimizer]) -> _Leaves:
    found: _Leaves = {}
    for optimizer in optimizers:
        own = {name: value for name, value in vars(optimizer).items() if name not in (*_SAVED, *_TORCH)}
        found |= {f"{type(optimizer).__name__}.{name}": list(_leaves(value, optimizer)) for name, value in own.items()}
    return found


def _leaves(value: Any, owner: Optimizer | None) -> Iterator[_Leaf]:
    """Yield the value's tensors, each with its version count, and its numbers; model parameters are saved anyway."""
    if isinstance(value, nn.Parameter | nn.Module):
        return
    if isinstance(value, Tensor):
        yield _leaf(value)
    elif isinstance(value, np.ndarray | np.generic):
        yield _nothing, value.tobytes() if value.dtype != object else None
    elif isinstance(value, int | float | complex | str) and not (owner is not None and isinstance(value, bool | str)):
        yield _nothing, value
    elif isinstance(value, Optimizer) and owner is not None:
        shared = value.state is owner.state
        inner = {k: v for k, v in vars(value).items() if k not in (*_SAVED, *_TORCH)}
        yield from _leaves([*inner.values(), {} if shared else [*value.state.values()]], owner)
    elif isinstance(value, Mapping):
        yield from _leaves([*value.values()], owner)
    elif isinstance(value, _SEVERAL):
        for item in value:
            yield from _leaves(item, owner)


def _leaf(tensor: Tensor) -> _Leaf:
    return weakref.ref(tensor), 0 if tensor.is_inference() else tensor._version


def _nothing() -> None:
    """Stand in for the tensor reference of a number."""


def _changed(before: _Leaves, now: _Leaves) -> Iterator[str]:
    return (name for name, leaves in now.items() if not _same(before.get(name, []), leaves))


def _same(before: Sequence[_Leaf], now: Sequence[_Leaf]) -> bool:
    return len(before) == len(now) and all(
        one() is other() and _equal(count, number) for (one, count), (other, number) in zip(before, now, strict=True)
    )


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)
