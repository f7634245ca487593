"""Dispatch modes that observe every operation of a thread; the only module that uses torch's dispatch modes.

Private APIs, tested on torch 2.11 to 2.13: `TorchDispatchMode` and how to disable such modes; the process group of a
collective; `UntypedStorage.resize_`, with which `fully_shard` frees gathered weights; the fake process group;
collectives as results of operations.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack
from typing_extensions import override

__all__ = [
    "DispatchMode",
    "OpObserver",
    "PendingCollective",
    "RandomOpDetector",
    "TorchDispatchMode",
    "fake_process_group",
    "group_size",
    "has_dispatch_mode",
    "hide_from_modes",
    "observe_storage_resizes",
    "op_name",
    "run_cpu_kernel",
    "written_tensors",
]


DispatchMode = TorchDispatchMode
"""A mode that intercepts each operation of its thread, including those of backward."""


@contextmanager
def hide_from_modes() -> Iterator[None]:
    """Hide Paceline's operations from dispatch modes, such as the mode of selective activation checkpointing."""
    with _disable_current_modes():
        yield


def has_dispatch_mode() -> bool:
    """Return whether this thread has an active dispatch mode. A mode intercepts only operations of its own thread."""
    return bool(_get_current_dispatch_mode_stack())


def run_cpu_kernel(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run the CPU kernel of an operation that is written in Python, so that a mode observes the operations inside."""
    return operation._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


class PendingCollective(dist.Work):
    """A collective in flight, which an operation may return. `wait` completes it and calls `on_complete`.

    Until `wait`, the object holds the collective's `inputs`, as gloo does.
    """

    def __init__(self, on_complete: Callable[[], object], *, inputs: Any = None) -> None:
        super().__init__()
        self._on_complete, self._inputs = on_complete, inputs

    def start(self) -> Any:
        """Keep this object alive until `wait`, and return it boxed, as collective operations return their work."""
        _IN_FLIGHT.add(self)
        return self.boxed()

    @override
    def is_completed(self) -> bool:
        """Return whether `wait` was called."""
        return self not in _IN_FLIGHT

    @override
    def wait(self, timeout: Any = None) -> bool:
        """Complete the collective and call `on_complete`."""
        if self in _IN_FLIGHT:
            _IN_FLIGHT.remove(self)
            self._inputs = None
            self._on_complete()
        return True


_IN_FLIGHT: set[PendingCollective] = set()


class RandomOpDetector(TorchDispatchMode):
    """A mode that detects whether this thread runs an operation that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_random_op = False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record whether it draws random numbers."""
        self.has_random_op = self.has_random_op or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class OpObserver(TorchDispatchMode):
    """A mode that calls `on_operation(operation, args, kwargs, result, has_drawn)` for each operation of this thread.

    `has_drawn`: whether the operation drew from a random generator; for meta tensors, whether it could.
    """

    def __init__(self, on_operation: Callable[[Any, Any, Any, Any, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_operation = on_operation

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then call `on_operation`."""
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        old_states = _generator_states() if may_draw else []
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        has_drawn = may_draw and (
            not (isinstance(first, Tensor) and first.device.type in ("cpu", "cuda"))
            or any(not torch.equal(old, new) for old, new in zip(old_states, _generator_states(), strict=True))
        )
        self._on_operation(func, args, kwargs or {}, result, has_drawn)
        return result


def _generator_states() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


@cache
def op_name(operation: Any) -> str:
    """Return the name in an operation's schema: "aten::add"."""
    name: str = operation._schema.name
    return name


def written_tensors(operation: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """Return the tensor arguments to which an operation writes."""
    tensors: list[Tensor] = []
    for index, name in _written_arguments(operation):
        value = args[index] if index < len(args) else kwargs.get(name)
        values = value if isinstance(value, list | tuple) else [value]
        tensors += [tensor for tensor in values if isinstance(tensor, Tensor)]
    return tensors


@cache
def _written_arguments(operation: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(operation._schema.arguments)
    return tuple((index, a.name) for index, a in arguments if a.alias_info is not None and a.alias_info.is_write)


@contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Create a fake default process group of `ranks` ranks; this process is rank 0, the other ranks do not exist.

    `init_process_group` sets a `sys.excepthook` that prefixes tracebacks with `[rank0]`; the previous hook is restored.
    """
    old_hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    sys.excepthook = old_hook
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_size(group: Any) -> int:
    """Return the number of ranks of a process group, which is a group, a boxed group or a group name."""
    if isinstance(group, str):
        group = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
    elif isinstance(group, torch.ScriptObject):
        group = dist.ProcessGroup.unbox(group)
    return 1 if group is None else int(group.size())


_RESIZE_OBSERVERS: dict[int, list[Callable[[torch.UntypedStorage], None]]] = {}  # by thread id
_ORIGINAL_RESIZE = torch.UntypedStorage.resize_
_LOCK = threading.Lock()


@contextmanager
def observe_storage_resizes(on_resize: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `on_resize` for every storage that this thread resizes; dispatch modes do not observe resizes."""
    thread_id = threading.get_ident()
    with _LOCK:
        _RESIZE_OBSERVERS.setdefault(thread_id, []).append(on_resize)
        torch.UntypedStorage.resize_ = _observed_resize  # type: ignore[assignment]
    try:
        yield
    finally:
        with _LOCK:
            _RESIZE_OBSERVERS[thread_id].remove(on_resize)
            if not _RESIZE_OBSERVERS[thread_id]:
                del _RESIZE_OBSERVERS[thread_id]
            if not _RESIZE_OBSERVERS:
                torch.UntypedStorage.resize_ = _ORIGINAL_RESIZE  # type: ignore[method-assign]


def _observed_resize(storage: torch.UntypedStorage, size: Any) -> Any:
    result = _ORIGINAL_RESIZE(storage, size)
    for on_resize in list(_RESIZE_OBSERVERS.get(threading.get_ident(), ())):
        on_resize(storage)
    return result
