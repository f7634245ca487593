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
    "name_of",
    "on_cpu",
    "storage_resizes",
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
    """Return whether a dispatch mode is active in this thread; it does not intercept operations of other threads."""
    return bool(_get_current_dispatch_mode_stack())


def on_cpu(operation: Any, args: Any, kwargs: Any) -> Any:
    """Run the CPU kernel of an operation that is written in Python; a mode can observe the operations inside it."""
    return operation._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


class PendingCollective(dist.Work):
    """A collective that is in flight until `wait`, which then calls `arrived`; an operation may return it.

    It holds `keeps`, the collective's inputs, until then, as gloo does.
    """

    def __init__(self, arrived: Callable[[], object], *, keeps: Any = None) -> None:
        super().__init__()
        self._arrived, self._keeps = arrived, keeps

    def begin(self) -> Any:
        """Return the boxed collective, as operations do; the object stays alive until `wait`."""
        _UNDER_WAY.add(self)
        return self.boxed()

    def is_completed(self) -> bool:
        """Return whether `wait` was called."""
        return self not in _UNDER_WAY

    def wait(self, timeout: Any = None) -> bool:
        """Complete the collective and call `arrived`."""
        if self in _UNDER_WAY:
            _UNDER_WAY.remove(self)
            self._keeps = None
            self._arrived()
        return True


_UNDER_WAY: set[PendingCollective] = set()


class RandomOpDetector(TorchDispatchMode):
    """A mode that detects whether this thread runs an operation that draws random numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and record whether it draws random numbers."""
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class OpObserver(TorchDispatchMode):
    """A mode that calls `see(operation, args, kwargs, result, drew)` for each operation of this thread.

    `drew`: whether the operation drew from a random generator; for meta tensors, whether it could.
    """

    def __init__(self, see: Callable[[Any, Any, Any, Any, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, then call `see`."""
        may_draw = torch.Tag.nondeterministic_seeded in func.tags
        before = _generators() if may_draw else []
        result = func(*args, **(kwargs or {}))
        first = result[0] if isinstance(result, tuple | list) and result else result
        drew = may_draw and (
            not (isinstance(first, Tensor) and first.device.type in ("cpu", "cuda"))
            or any(not torch.equal(old, new) for old, new in zip(before, _generators(), strict=True))
        )
        self._see(func, args, kwargs or {}, result, drew)
        return result


def _generators() -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])]


@cache
def name_of(operation: Any) -> str:
    """Return the name in an operation's schema: "aten::add"."""
    found: str = operation._schema.name
    return found


def written_tensors(operation: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """Return the tensor arguments to which an operation writes."""
    found: list[Tensor] = []
    for place, name in _written(operation):
        value = args[place] if place < len(args) else kwargs.get(name)
        found += [part for part in (value if isinstance(value, list | tuple) else [value]) if isinstance(part, Tensor)]
    return found


@cache
def _written(operation: Any) -> tuple[tuple[int, str], ...]:
    arguments = enumerate(operation._schema.arguments)
    return tuple((place, a.name) for place, a in arguments if a.alias_info is not None and a.alias_info.is_write)


@contextmanager
def fake_process_group(ranks: int) -> Iterator[None]:
    """Create a fake default process group of `ranks` ranks; this process is rank 0, the other ranks do not exist.

    `init_process_group` sets a `sys.excepthook` that prefixes tracebacks with `[rank0]`; the previous hook is restored.
    """
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    sys.excepthook = hook
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_size(asked: Any) -> int:
    """Return the number of ranks of a process group, which is a group, a boxed group or a group name."""
    if isinstance(asked, str):
        asked = distributed_c10d._resolve_process_group(asked)  # type: ignore[attr-defined, arg-type]
    elif isinstance(asked, torch.ScriptObject):
        asked = dist.ProcessGroup.unbox(asked)
    return 1 if asked is None else int(asked.size())


_RESIZES: dict[int, list[Callable[[torch.UntypedStorage], None]]] = {}
_RESIZE = torch.UntypedStorage.resize_
_LOCK = threading.Lock()


@contextmanager
def storage_resizes(seen: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `seen` for every storage that this thread resizes, which no dispatch mode observes."""
    me = threading.get_ident()
    with _LOCK:
        _RESIZES.setdefault(me, []).append(seen)
        torch.UntypedStorage.resize_ = _resize  # type: ignore[assignment]
    try:
        yield
    finally:
        with _LOCK:
            _RESIZES[me].remove(seen)
            if not _RESIZES[me]:
                del _RESIZES[me]
            if not _RESIZES:
                torch.UntypedStorage.resize_ = _RESIZE  # type: ignore[method-assign]


def _resize(storage: torch.UntypedStorage, size: Any) -> Any:
    result = _RESIZE(storage, size)
    for seen in list(_RESIZES.get(threading.get_ident(), ())):
        seen(storage)
    return result
