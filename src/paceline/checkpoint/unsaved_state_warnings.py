"""Warnings about unsaved state: attributes of optimizer, model and loss that change and are in no checkpoint."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.process_group import World
from paceline.step.loss.modules_captured_by_loss import find_modules

_SAVED_ATTRIBUTES = ("state", "param_groups", "defaults")
_TORCH_ATTRIBUTES = ("_step_count", "_numel_cache")  # written by torch, to warn or to be faster
_ADVICE = (  # for attributes of optimizers, and of modules
    "in the optimizer's state, self.state[p], or in a parameter group",
    "in a buffer of the model, self.register_buffer(name, tensor)",
)
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_COLLECTIONS = (list, tuple, set, deque)
_Leaf = tuple[Callable[[], Any], Any]  # (function that returns the tensor or None, version count or value)
_Leaves = dict[str, list[_Leaf]]


class UntrackedStateWarning:
    """A warning about attributes that change but are in no checkpoint, based on a record of their initial values.

    Optimizers are recorded when this object is created. Modules are recorded at `start_tracking`, after the first step:
    objects that the first forward creates (a cache, a mask) are not state, because a resumed run creates them again.
    """

    def __init__(self, optimizers: Sequence[Optimizer], *, model: nn.Module | None = None, loss: Any = None) -> None:
        self._optimizers = optimizers
        self._model = model
        model_ids = {id(module) for module in model.modules()} if model is not None else set()
        self._loss = [pair for pair in find_modules(loss) if id(pair[1]) not in model_ids]
        self._initial_optimizers = _leaves_of_optimizers(optimizers)
        self._initial_modules: _Leaves | None = None
        self._has_warned = False

    def start_tracking(self) -> None:
        """Record the current attributes of the modules."""
        self._initial_modules = self._module_leaves()

    def warning_text(self, world: World | None = None) -> str:
        """Return a warning about attributes that changed on any rank; empty if none did, or after the first warning.

        All ranks of `world` call this.
        """
        changed = (
            [*_changed_names(self._initial_optimizers, _leaves_of_optimizers(self._optimizers))],
            [] if self._initial_modules is None else [*_changed_names(self._initial_modules, self._module_leaves())],
        )
        changed_by_rank = [changed] if world is None else world.gather_json(changed)
        names_by_owner = [
            list(dict.fromkeys(name for rank_changes in changed_by_rank for name in rank_changes[owner]))
            for owner in range(len(changed))
        ]
        names = [name for owner_names in names_by_owner for name in owner_names]
        if self._has_warned or not names:
            return ""
        self._has_warned = True
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        advice = [text for text, changed_names in zip(_ADVICE, names_by_owner, strict=True) if changed_names]
        return (
            f"checkpoints do not contain {shown}, and a resumed run starts with the job's initial value: "
            f"keep such state {', and '.join(advice)}"
        )

    def _module_leaves(self) -> _Leaves:
        leaves: _Leaves = {}
        for path, module in self._model.named_modules() if self._model is not None else ():
            leaves |= _leaves_of_module(path or type(module).__name__, module)
        for path, module in self._loss:
            leaves |= _leaves_of_module(path, module)
            leaves |= {f"{path}.{name}": [_leaf(tensor)] for name, tensor in module.named_buffers(recurse=False)}
        return leaves


def _leaves_of_module(path: str, module: nn.Module) -> _Leaves:
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        return {}
    attributes = {name: value for name, value in vars(module).items() if name not in _MODULE_ATTRIBUTES}
    return {f"{path}.{name}": list(_leaves(value, None)) for name, value in attributes.items()}


def _leaves_of_optimizers(optimizers: Sequence[Optimizer]) -> _Leaves:
    leaves: _Leaves = {}
    for optimizer in optimizers:
        attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in (*_SAVED_ATTRIBUTES, *_TORCH_ATTRIBUTES)
        }
        leaves |= {
            f"{type(optimizer).__name__}.{name}": list(_leaves(value, optimizer)) for name, value in attributes.items()
        }
    return leaves


def _leaves(value: Any, owner: Optimizer | None) -> Iterator[_Leaf]:
    """Yield a value's tensors with their version counts, its numbers, and its text. Parameters are saved anyway."""
    if isinstance(value, nn.Parameter | nn.Module):
        return
    if isinstance(value, Tensor):
        yield _leaf(value)
    elif isinstance(value, np.ndarray | np.generic):
        yield _no_tensor, value.tobytes() if value.dtype != object else None
    elif isinstance(value, int | float | complex | str) and not (owner is not None and isinstance(value, bool | str)):
        yield _no_tensor, value
    elif isinstance(value, Optimizer) and owner is not None:
        shared = value.state is owner.state
        inner = {k: v for k, v in vars(value).items() if k not in (*_SAVED_ATTRIBUTES, *_TORCH_ATTRIBUTES)}
        yield from _leaves([*inner.values(), {} if shared else [*value.state.values()]], owner)
    elif isinstance(value, Mapping):
        yield from _leaves([*value.values()], owner)
    elif isinstance(value, _COLLECTIONS):
        for item in value:
            yield from _leaves(item, owner)


def _leaf(tensor: Tensor) -> _Leaf:
    return weakref.ref(tensor), 0 if tensor.is_inference() else tensor._version


def _no_tensor() -> None:
    """Return None. In a leaf that is not a tensor, this function replaces the reference to a tensor."""


def _changed_names(before: _Leaves, after: _Leaves) -> Iterator[str]:
    return (name for name, leaves in after.items() if not _are_same_leaves(before.get(name, []), leaves))


def _are_same_leaves(before: Sequence[_Leaf], after: Sequence[_Leaf]) -> bool:
    return len(before) == len(after) and all(
        get_before() is get_after() and _are_equal_values(value_before, value_after)
        for (get_before, value_before), (get_after, value_after) in zip(before, after, strict=True)
    )


def _are_equal_values(one: Any, other: Any) -> bool:
    return bool(one == other) or (one != one and other != other)
