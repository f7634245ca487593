"""Recording of a model's constructor: its tensors are meta tensors, and each operation is added to a tape.

To the constructor they look like CPU tensors. Values that it reads (`.item()`, `.tolist()`, `.numpy()`, a comparison)
are computed from the tape.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.parallel.initialization.init_tape import (
    OVERWRITING,
    InitTape,
    RecordedStep,
    RecordedView,
    Unrecordable,
    map_arguments,
    tensors_in,
)
from paceline.torch_internals.dispatch_modes import TorchDispatchMode

_CPU = torch.device("cpu")
_ELSEWHERE = {"generator": None, "device": _CPU}  # replay is on the CPU, with this package's random streams
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__}


@contextmanager
def record_init(tape: InitTape) -> Iterator[list[str]]:
    """Record a build inside this context; yield a list of reasons why a plain build may differ."""
    doubts: list[str] = []
    with _Record(tape, doubts) as record, AsIfOn(_CPU, record.read):
        yield doubts


class AsIfOn(TorchFunctionMode):
    """A function mode in which meta tensors report a real device, and reads call `read`."""

    def __init__(self, device: torch.device, read: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._device, self._read = device, read

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not has_no_memory(first):
            return func(*args, **kwargs)
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func == Tensor.device.__get__:
            return self._device
        if func in _READING:
            return func(self._read(first), *args[1:], **kwargs)
        if func is Tensor.cpu:
            return first
        if func is Tensor.to:
            args = (first, *(arg for arg in args[1:] if not self._is_here(arg)))
            kwargs = {name: value for name, value in kwargs.items() if not (name == "device" and self._is_here(value))}
            kwargs = {name: value for name, value in kwargs.items() if not (name == "device" and value is None)}
            return func(*args, **kwargs) if len(args) > 1 or set(kwargs) - {"non_blocking", "copy"} else first
        return func(*args, **kwargs)

    def _is_here(self, value: Any) -> bool:
        if isinstance(value, torch.device):
            return value.type == "cpu" or value == self._device
        return isinstance(value, str) and value in ("cpu", str(self._device))


class _Record(TorchDispatchMode):
    """A dispatch mode that creates tensors on the meta device, and records operations."""

    def __init__(self, tape: InitTape, doubts: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tape, self._doubts = tape, doubts
        self._is_reading = False

    def read(self, tensor: Tensor) -> Tensor:
        """Return the real values of a tensor at this point."""
        view = RecordedView.of(tensor)
        self._is_reading = True
        try:
            return self._tape.values(view)[0]
        finally:
            self._is_reading = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._is_reading:
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        if given and not any(has_no_memory(tensor) for tensor in given):
            if draws:
                self._doubts.append(f"it draws into a tensor that was made elsewhere ({name_of(func)})")
            return func(*args, **kwargs)
        is_seen = name_of(func) == "_to_copy" and kwargs.get("device") == _CPU  # code inside torch reads the values
        if is_seen or returns_numbers(func):
            return self._for_real(func, args, kwargs)
        if name_of(func) == "resize_":
            raise Unrecordable("resize_ changes how much memory a tensor has")
        written = _written(func, args, kwargs)
        if any(not has_no_memory(tensor) for tensor in written):
            return self._for_real(func, args, kwargs)
        return self._recorded(func, args, kwargs, given, written, draws)

    def _for_real(self, func: Any, args: Any, kwargs: Any) -> Any:
        def real(value: Any) -> Any:
            return self.read(value) if isinstance(value, Tensor) and has_no_memory(value) else value

        return func(*map_arguments(args, real), **map_arguments(kwargs, real))

    def _recorded(
        self, func: Any, args: Any, kwargs: Any, given: list[Tensor], written: list[Tensor], draws: bool
    ) -> Any:
        if "device" in arguments_of(func):
            on_meta: dict[str, Any] = {**kwargs, "device": torch.device("meta")}
        else:
            on_meta = dict(kwargs)
        try:
            found = func(*map_arguments(args, as_meta), **map_arguments(on_meta, as_meta))
        except NotImplementedError as error:
            if written:
                raise Unrecordable(f"{name_of(func)} has no form without memory") from error
            return self._for_real(func, args, kwargs)
        reads = frozenset(RecordedView.of(tensor).memory for tensor in given if has_no_memory(tensor))
        makes = tuple(self._made(tensor, reads) for tensor in tensors_in(found))
        if name_of(func).startswith("set_") or not (written or any(makes)):
            return found
        kept_kwargs = {**kwargs, **{name: value for name, value in _ELSEWHERE.items() if name in kwargs}}
        overwrites = _overwritten(func, given)
        self._tape.add(
            RecordedStep(
                call=func,
                args=map_arguments(args, self._kept),
                kwargs=map_arguments(kept_kwargs, self._kept),
                draws=draws,
                reads=reads - {overwrites},
                writes=frozenset(RecordedView.of(tensor).memory for tensor in written),
                makes=makes,
                overwrites=overwrites,
            )
        )
        return found

    def _made(self, tensor: Tensor, reads: frozenset[int]) -> RecordedView | None:
        if tensor.layout is not torch.strided:
            raise Unrecordable(f"a tensor of layout {tensor.layout}")
        view = RecordedView.of(tensor)
        if view.memory in reads or self._tape.knows(view.memory):
            return None
        self._tape.hold(tensor)
        return view

    def _kept(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if has_no_memory(value):
            return RecordedView.of(value)
        self._tape.constant_bytes += value.nbytes
        return value.detach().clone()


def has_no_memory(tensor: Tensor) -> bool:
    """Return True if the tensor is on the meta device, whatever device it reports."""
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.layout is torch.strided and tensor.untyped_storage().device.type == "meta"


def returns_numbers(func: Any) -> bool:
    """Return True if the operation returns a number or a boolean, not only tensors."""
    return any("Tensor" not in str(value.type) for value in func._schema.returns)


def arguments_of(func: Any) -> set[str]:
    """Return the argument names of an operation."""
    return {argument.name for argument in func._schema.arguments}


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation changes."""
    found: list[Tensor] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[place] if place < len(args) else kwargs.get(argument.name))
    return found


def _overwritten(func: Any, given: list[Tensor]) -> int | None:
    """Return the storage that the operation fully overwrites, or None."""
    target = given[0] if given else None
    if target is None or not has_no_memory(target) or name_of(func) not in OVERWRITING:
        return None
    view = RecordedView.of(target)
    is_all = target.nbytes == target.untyped_storage().nbytes() and 0 not in view.stride
    reads_itself = any(RecordedView.of(other).memory == view.memory for other in given[1:] if has_no_memory(other))
    return view.memory if is_all and not reads_itself else None


def as_meta(value: Any) -> Any:
    if isinstance(value, Tensor) and not has_no_memory(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return value


def name_of(func: Callable[..., Any]) -> str:
    return str(getattr(func, "__name__", func)).partition(".")[0]
