"""Record a model's constructor: its tensors are meta tensors, and each operation is added to a tape.

The constructor sees CPU tensors. Values that it reads (`.item()`, `.tolist()`, `.numpy()`, a comparison) are computed
from the tape.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from paceline.parallel.initialization.init_tape import (
    OVERWRITING_OPERATIONS,
    InitTape,
    RecordedStep,
    RecordedView,
    Unrecordable,
    find_tensors,
    map_arguments,
)
from paceline.torch_internals.dispatch_modes import TorchDispatchMode

_CPU = torch.device("cpu")
_REPLAY_ARGUMENTS = {"generator": None, "device": _CPU}  # replay runs on the CPU, with Paceline's random streams
_READ_METHODS = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


@contextmanager
def record_init(tape: InitTape) -> Iterator[list[str]]:
    """Record a build inside this context; yield a list of reasons why a plain build may give other values."""
    doubts: list[str] = []
    with _RecordMode(tape, doubts) as record, ReportedDeviceMode(_CPU, record.read):
        yield doubts


class ReportedDeviceMode(TorchFunctionMode):
    """A torch function mode in which meta tensors report `device`, and `tolist` and `numpy` get values from `read`."""

    def __init__(self, device: torch.device, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._device, self._read = device, read

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not is_on_meta(first):
            return func(*args, **kwargs)
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func == Tensor.device.__get__:
            return self._device
        if func in _READ_METHODS:
            return func(self._read(first), *args[1:], **kwargs)
        if func is Tensor.cpu:
            return first
        if func is Tensor.to:
            args = (first, *(arg for arg in args[1:] if not self._is_reported_device(arg)))
            kwargs = {
                name: value
                for name, value in kwargs.items()
                if not (name == "device" and self._is_reported_device(value))
            }
            kwargs = {name: value for name, value in kwargs.items() if not (name == "device" and value is None)}
            return func(*args, **kwargs) if len(args) > 1 or set(kwargs) - {"non_blocking", "copy"} else first
        return func(*args, **kwargs)

    def _is_reported_device(self, value: Any) -> bool:
        if isinstance(value, torch.device):
            return value.type == "cpu" or value == self._device
        return isinstance(value, str) and value in ("cpu", str(self._device))


class _RecordMode(TorchDispatchMode):
    """A dispatch mode that creates tensors on the meta device, and records operations."""

    def __init__(self, tape: InitTape, doubts: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape, self._doubts = tape, doubts
        self._is_replaying = False

    def read(self, tensor: Tensor) -> Tensor:
        """Return the real values of a tensor at this point."""
        view = RecordedView.from_tensor(tensor)
        self._is_replaying = True
        try:
            return self._tape.compute_values(view)[0]
        finally:
            self._is_replaying = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_replaying:
            return func(*args, **kwargs)
        inputs = find_tensors((args, kwargs))
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if inputs and not any(is_on_meta(tensor) for tensor in inputs):
            if is_random:
                self._doubts.append(f"it draws into a tensor that was created elsewhere ({operation_name(func)})")
            return func(*args, **kwargs)
        # `ReportedDeviceMode` removes the device CPU from `Tensor.to` and `Tensor.cpu`. Other copies to the CPU, as by
        # `torch.as_tensor` or pickle, need the real values.
        is_copy_to_cpu = operation_name(func) == "_to_copy" and kwargs.get("device") == _CPU
        if is_copy_to_cpu or returns_numbers(func):
            return self._run_on_real(func, args, kwargs)
        if operation_name(func) == "resize_":
            raise Unrecordable("it calls resize_, which changes how much memory a tensor has")
        written = _written_arguments(func, args, kwargs)
        if any(not is_on_meta(tensor) for tensor in written):
            return self._run_on_real(func, args, kwargs)
        return self._record_operation(func, args, kwargs, inputs, written, is_random)

    def _run_on_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        def to_real(value: Any) -> Any:
            return self.read(value) if isinstance(value, Tensor) and is_on_meta(value) else value

        return func(*map_arguments(args, to_real), **map_arguments(kwargs, to_real))

    def _record_operation(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], written: list[Tensor], is_random: bool
    ) -> Any:
        """Run an operation on the meta device and append it to the tape; run it on real values if meta lacks it."""
        if "device" in argument_names(func):
            meta_kwargs: dict[str, Any] = {**kwargs, "device": torch.device("meta")}
        else:
            meta_kwargs = dict(kwargs)
        try:
            result = func(*map_arguments(args, to_meta), **map_arguments(meta_kwargs, to_meta))
        except NotImplementedError as error:
            if written:
                raise Unrecordable(f"{operation_name(func)} does not run on the meta device") from error
            return self._run_on_real(func, args, kwargs)
        read_storages = frozenset(RecordedView.from_tensor(tensor).storage for tensor in inputs if is_on_meta(tensor))
        created_views = tuple(self._created_view(tensor, read_storages) for tensor in find_tensors(result))
        if operation_name(func).startswith("set_") or not (written or any(created_views)):
            return result
        replay_kwargs = {**kwargs, **{name: value for name, value in _REPLAY_ARGUMENTS.items() if name in kwargs}}
        overwritten_storage = _find_overwritten(func, inputs)
        self._tape.append_step(
            RecordedStep(
                call=func,
                args=map_arguments(args, self._to_recorded),
                kwargs=map_arguments(replay_kwargs, self._to_recorded),
                is_random=is_random,
                read_storages=read_storages - {overwritten_storage},
                written_storages=frozenset(RecordedView.from_tensor(tensor).storage for tensor in written),
                created_views=created_views,
                overwritten_storage=overwritten_storage,
            )
        )
        return result

    def _created_view(self, tensor: Tensor, read_storages: frozenset[int]) -> RecordedView | None:
        if tensor.layout is not torch.strided:
            raise Unrecordable(f"it creates a tensor of layout {tensor.layout}")
        view = RecordedView.from_tensor(tensor)
        if view.storage in read_storages or self._tape.has_storage(view.storage):
            return None
        self._tape.keep_alive(tensor)
        return view

    def _to_recorded(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if is_on_meta(value):
            return RecordedView.from_tensor(value)
        self._tape.constant_bytes += value.nbytes
        return value.detach().clone()


def is_on_meta(tensor: Tensor) -> bool:
    """Return True if the tensor is on the meta device, whatever device it reports."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.layout is torch.strided and tensor.untyped_storage().device.type == "meta"


def returns_numbers(func: Any) -> bool:
    """Return True if the operation returns a number or a boolean, not only tensors."""
    return any("Tensor" not in str(value.type) for value in func._schema.returns)


def argument_names(func: Any) -> set[str]:
    """Return the argument names of an operation."""
    return {argument.name for argument in func._schema.arguments}


def _written_arguments(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation changes."""
    written: list[Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += find_tensors(args[position] if position < len(args) else kwargs.get(argument.name))
    return written


def _find_overwritten(func: Any, inputs: list[Tensor]) -> int | None:
    """Return the storage that the operation overwrites completely without reading it, or None."""
    output = inputs[0] if inputs else None
    if output is None or not is_on_meta(output) or operation_name(func) not in OVERWRITING_OPERATIONS:
        return None
    view = RecordedView.from_tensor(output)
    covers_storage = output.nbytes == output.untyped_storage().nbytes() and 0 not in view.stride
    reads_itself = any(
        RecordedView.from_tensor(other).storage == view.storage for other in inputs[1:] if is_on_meta(other)
    )
    return view.storage if covers_storage and not reads_itself else None


def to_meta(value: Any) -> Any:
    if isinstance(value, Tensor) and not is_on_meta(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def operation_name(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", func)).partition(".")[0]
