"""Run the forward of a model whose parameters are on the meta device, with shapes only or with temporary values.

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
from typing_extensions import override

from paceline.parallel.initialization.init_tape import OVERWRITING_OPERATIONS, RecordedView, find_tensors, map_arguments
from paceline.parallel.initialization.record_mode import (
    ReportedDeviceMode,
    argument_names,
    is_on_meta,
    operation_name,
    returns_numbers,
    to_meta,
)
from paceline.torch_internals.dispatch_modes import TorchDispatchMode, hide_from_modes, written_tensors

CreateTensor = Callable[[int], Tensor]
"""A function that returns the full tensor for the key of a storage."""


class UnknownNumber(BaseException):
    """A read of a value that `meta_forward` does not have. No `except Exception` in a forward catches it."""


@contextmanager
def meta_forward(device: torch.device) -> Iterator[None]:
    """Run forwards with meta tensors inside this context; these tensors report that they are on `device`.

    Raises:
        UnknownNumber: the forward read a value that depends on a parameter.
    """
    with _MetaForwardMode(device), ReportedDeviceMode(device, _refuse_read):
        yield


@contextmanager
def lend_parameters(create_tensor: CreateTensor, *, device: torch.device) -> Iterator[None]:
    """Run forwards with real parameter values inside this context.

    `create_tensor` returns the full tensor for the key of a storage; the last tensor is cached.
    """
    lender = _LendMode(create_tensor, device)
    with lender, ReportedDeviceMode(device, lender.read_tensor):
        yield


class _MetaForwardMode(TorchDispatchMode):
    """A dispatch mode that runs operations on unknown values on the meta device, and all others on real tensors.

    `_unknown_storages` contains the storages of real tensors that were overwritten with unknown values.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._unknown_storages = WeakIdKeyDictionary()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation, on real tensors or on the meta device."""
        kwargs = dict(kwargs or {})
        inputs = find_tensors((args, kwargs))
        if not any(self._is_unknown(tensor) for tensor in inputs):
            return func(*args, **_replace_meta_device(kwargs, self._device))
        if returns_numbers(func):
            raise UnknownNumber("a number, as .item() and `if` do")
        targets = [tensor for tensor in written_tensors(func, args, kwargs) if not is_on_meta(tensor)]
        if targets and self._overwrites_with_known_values(func, inputs):
            return func(*args, **kwargs)
        if not targets and not any(is_on_meta(tensor) for tensor in inputs) and _is_view(func):
            return func(*args, **kwargs)  # a view of overwritten memory, which must see later writes
        result = self._run_on_meta(func, args, kwargs)
        for tensor in targets:
            self._unknown_storages[tensor.untyped_storage()] = True
        return targets[0] if targets and isinstance(result, Tensor) and _returns_written(func) else result

    def _run_on_meta(self, func: Any, args: Any, kwargs: Any) -> Any:
        if "device" in argument_names(func):
            kwargs = {**kwargs, "device": torch.device("meta")}
        try:
            return func(*map_arguments(args, to_meta), **map_arguments(kwargs, to_meta))
        except NotImplementedError as error:
            raise UnknownNumber(f"the result of {operation_name(func)}") from error

    def _overwrites_with_known_values(self, func: Any, inputs: list[Tensor]) -> bool:
        """Return whether the operation fills a whole storage with known values; the storage then counts as known."""
        target, *sources = inputs
        is_whole_storage = target.nbytes == target.untyped_storage().nbytes() and 0 not in target.stride()
        if (
            operation_name(func) not in OVERWRITING_OPERATIONS
            or not is_whole_storage
            or any(self._is_unknown(tensor) for tensor in sources)
        ):
            return False
        self._unknown_storages.pop(target.untyped_storage(), None)
        return True

    def _is_unknown(self, tensor: Tensor) -> bool:
        return is_on_meta(tensor) or (
            bool(self._unknown_storages) and tensor.untyped_storage() in self._unknown_storages
        )


class _LendMode(TorchDispatchMode):
    """A dispatch mode that passes real tensors to each operation; views of parameters stay on the meta device."""

    def __init__(self, create_tensor: CreateTensor, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._create_tensor, self._device = create_tensor, device
        self._cached: tuple[int, Tensor] | None = None

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation with real parameters."""
        kwargs = _replace_meta_device(dict(kwargs or {}), self._device)
        if _is_view(func) or not any(is_on_meta(tensor) for tensor in find_tensors((args, kwargs))):
            return func(*args, **kwargs)
        return func(*map_arguments(args, self._real_argument), **map_arguments(kwargs, self._real_argument))

    def real_tensor(self, tensor: Tensor) -> Tensor:
        """Return the values of a parameter, or of a view of one."""
        view = RecordedView.from_tensor(tensor)
        if self._cached is None or self._cached[0] != view.storage:
            self._cached = None
            self._cached = (view.storage, self._create_tensor(view.storage))
        memory = self._cached[1]
        return torch.empty(0, dtype=view.dtype, device=memory.device).set_(
            memory.untyped_storage(), view.offset, view.size, view.stride
        )

    def read_tensor(self, tensor: Tensor) -> Tensor:
        """Return the values of a parameter that Python reads directly, hidden from other dispatch modes."""
        with hide_from_modes():
            return self.real_tensor(tensor)

    def _real_argument(self, value: Any) -> Any:
        return self.real_tensor(value) if isinstance(value, Tensor) and is_on_meta(value) else value


def _refuse_read(_: Tensor) -> Tensor:
    raise UnknownNumber("numbers, as .tolist() does")


def _replace_meta_device(kwargs: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Replace the meta device by `device`, since a forward creates new tensors on a parameter's device."""
    device_argument = kwargs.get("device")
    return (
        {**kwargs, "device": device}
        if isinstance(device_argument, torch.device) and device_argument.type == "meta"
        else kwargs
    )


def _is_view(func: Any) -> bool:
    """Return True if the operation returns views of its inputs and does not write to them."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _returns_written(func: Any) -> bool:
    """Return True if the operation returns the tensors that it writes to."""
    return all(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)
