"""What sees every operation of a thread, and how to stay out of its sight: torch's dispatch modes, used in one place.

Tried on torch 2.11 to 2.13: `TorchDispatchMode` and setting such modes aside; the group that a collective names; the
resizing of storages, by which `fully_shard` lets gathered weights go; the group in which nothing arrives; collectives
that are handed back as an operation's result.
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
"""What sees each operation that runs in its thread, gradients' included."""


@contextmanager
def hide_from_modes() -> Iterator[None]:
    """Hide operations of our own from dispatch modes, such as the one that pairs a forward with its second run."""
    with _disable_current_modes():
        yield


def has_dispatch_mode() -> bool:
    """Return whether a dispatch mode sees the operations of this thread; those of other threads it does not see."""
    return bool(_get_current_dispatch_mode_stack())


def on_cpu(operation: Any, args: Any, kwargs: Any) -> Any:
    """What an operation that is written in Python does on a CPU, where a mode can see each of its own operations."""
    return operation._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)


class PendingCollective(dist.Work):
    """A collective that is on its way until it is waited for, then `arrived` is called; an operation may return it.

    It `keeps` until then what it was given, as gloo does.
    """

    def __init__(self, arrived: Callable[[], object], *, keeps: Any = None) -> None:
        super().__init__()
        self._arrived, self._keeps = arrived, keeps

    def begin(self) -> Any:
        """As operations return it; it lives until somebody waits."""
        _UNDER_WAY.add(self)
        return self.boxed()

    def is_completed(self) -> bool:
        """Not before it is waited for."""
        return self not in _UNDER_WAY

    def wait(self, timeout: Any = None) -> bool:
        """It has arrived."""
        if self in _UNDER_WAY:
            _UNDER_WAY.remove(self)
            self._keeps = None
            self._arrived()
        return True


_UNDER_WAY: set[PendingCollective] = set()


class RandomOpDetector(TorchDispatchMode):
    """Sees whether an operation that draws random numbers runs in this thread while the mode is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass everything on."""
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class OpObserver(TorchDispatchMode):
    """Tells `see(operation, args, kwargs, result, drew)` of each operation of this thread while the mode is on.

    `drew`: whether it took numbers from a random generator; without memory ("meta"), whether it might.
    """

    def __init__(self, see: Callable[[Any, Any, Any, Any, bool], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, then tell."""
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
    """As its schema has it: "aten::add"."""
    found: str = operation._schema.name
    return found


def written_tensors(operation: Any, args: Sequence[Any], kwargs: Any) -> list[Tensor]:
    """The tensors among its arguments that an operation writes to."""
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
    """A default group of so many ranks, of which this process is the first and the only one.

    torch then prefixes every traceback with `[rank0]`: the hook that was there before is put back.
    """
    hook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    sys.excepthook = hook
    try:
        yield
    finally:
        dist.destroy_process_group()


def group_size(asked: Any) -> int:
    """Ranks of the group that a collective is given, which is the group, its box, or its name."""
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
    """Tell of every storage that this thread resizes, which no dispatch mode sees."""
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
