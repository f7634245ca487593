"""A forward of a model with parameters on the meta device, with shapes only or with temporary parameter values.

In `meta_forward`, tensors that depend on a parameter are meta tensors: they have a shape and a dtype but no values. All
others (the batch, positions, masks, buffers) are computed as usual, so the forward takes the same branches as in a real
run. If Python reads a value that depends on a parameter (an `if`, `.item()`, the tokens of an expert), `UnknownNumber`
is raised. Then `lend_parameters` runs the forward with values: each parameter is created when an operation needs it,
and freed afterwards.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from paceline.parallel.initialization.init_tape import OVERWRITING, RecordedView, map_arguments, tensors_in
from paceline.parallel.initialization.record_mode import (
    AsIfOn,
    arguments_of,
    as_meta,
    has_no_memory,
    name_of,
    returns_numbers,
)
from paceline.torch_internals.dispatch_modes import TorchDispatchMode, hide_from_modes, written_tensors

Make = Callable[[int], Tensor]


class UnknownNumber(BaseException):
    """A read of a value that `meta_forward` does not have. It is no `Exception`, so a forward's `except` ignores it."""


@contextmanager
def meta_forward(device: torch.device) -> Iterator[None]:
    """Run forwards with meta tensors inside this context; they report that they are on `device`.

    Raises:
        UnknownNumber: the forward read a value that depends on a parameter.
    """
    with _Sketch(device), AsIfOn(device, _refused):
        yield


@contextmanager
def lend_parameters(make: Make, *, device: torch.device) -> Iterator[None]:
    """Run forwards with real parameter values inside this context.

    `create_tensor` returns the full tensor for the key of a storage; the last one is cached.
    """
    lender = _Lend(make, device)
    with lender, AsIfOn(device, lender.read):
        yield


class _Sketch(TorchDispatchMode):
    """A dispatch mode that runs operations on unknown values on the meta device, and all others on real tensors.

    `_lost` contains the storages of real tensors that were overwritten with unknown values.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._lost = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, on real tensors or on the meta device."""
        kwargs = dict(kwargs or {})
        given = tensors_in((args, kwargs))
        if not any(self._is_unknown(tensor) for tensor in given):
            return func(*args, **_here(kwargs, self._device))
        if returns_numbers(func):
            raise UnknownNumber("a number, as .item() and `if` do")
        targets = [tensor for tensor in written_tensors(func, args, kwargs) if not has_no_memory(tensor)]
        if targets and self._makes_known(func, given):
            return func(*args, **kwargs)
        if not targets and not any(has_no_memory(tensor) for tensor in given) and _is_view(func):
            return func(*args, **kwargs)  # a view of lost memory, which must see later writes
        found = self._without_numbers(func, args, kwargs)
        for tensor in targets:
            self._lost[tensor.untyped_storage()] = True
        return targets[0] if targets and isinstance(found, Tensor) and _is_written(func) else found

    def _without_numbers(self, func: Any, args: Any, kwargs: Any) -> Any:
        if "device" in arguments_of(func):
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            return func(*map_arguments(args, as_meta), **map_arguments(kwargs, as_meta))
        except NotImplementedError as error:
            raise UnknownNumber(f"what {name_of(func)} gives") from error

    def _makes_known(self, func: Any, given: list[Tensor]) -> bool:
        """Return True if the operation overwrites a full tensor with known values."""
        target, *others = given
        is_all = target.nbytes == target.untyped_storage().nbytes() and 0 not in target.stride()
        if name_of(func) not in OVERWRITING or not is_all or any(self._is_unknown(tensor) for tensor in others):
            return False
        self._lost.pop(target.untyped_storage(), None)
        return True

    def _is_unknown(self, tensor: Tensor) -> bool:
        return has_no_memory(tensor) or (bool(self._lost) and tensor.untyped_storage() in self._lost)


class _Lend(TorchDispatchMode):
    """A dispatch mode that passes real tensors to each operation; views of parameters stay on the meta device."""

    def __init__(self, make: Make, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._make, self._device = make, device
        self._last: tuple[int, Tensor] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation with real parameters."""
        kwargs = _here(dict(kwargs or {}), self._device)
        if _is_view(func) or not any(has_no_memory(tensor) for tensor in tensors_in((args, kwargs))):
            return func(*args, **kwargs)
        return func(*map_arguments(args, self._real), **map_arguments(kwargs, self._real))

    def real(self, tensor: Tensor) -> Tensor:
        """Return the values of a parameter, or of a view of one."""
        view = RecordedView.of(tensor)
        if self._last is None or self._last[0] != view.memory:
            self._last = None
            self._last = (view.memory, self._make(view.memory))
        memory = self._last[1]
        return torch.empty(0, dtype=view.dtype, device=memory.device).set_(
            memory.untyped_storage(), view.offset, view.size, view.stride
        )

    def read(self, tensor: Tensor) -> Tensor:
        """Return the values of a parameter that Python reads directly, hidden from other dispatch modes."""
        with hide_from_modes():
            return self.real(tensor)

    def _real(self, value: Any) -> Any:
        return self.real(value) if isinstance(value, Tensor) and has_no_memory(value) else value


def _refused(_: Tensor) -> Tensor:
    raise UnknownNumber("numbers, as .tolist() does")


def _here(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Replace the meta device by `device`, since a forward creates new tensors on a parameter's device."""
    where = kwargs.get("device")
    return {**kwargs, "device": device} if isinstance(where, torch.device) and where.type == "meta" else kwargs


def _is_view(func: Any) -> bool:
    """Return True if the operation returns views of its inputs, unchanged."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _is_written(func: Any) -> bool:
    """Return True if the operation returns the tensors that it writes to."""
    return all(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)
