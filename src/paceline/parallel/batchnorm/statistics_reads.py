"""Detect user code that reads a norm's statistics during a step, such as `h + self.norm.running_mean`.

Each microbatch of a rank starts from the statistics before the step, so this code reads other values than in one
process. The norm itself may use its statistics: `KernelWatch` records its kernels, and a formula such as
`self.running_mean += w * (mean - self.running_mean)` only updates the statistics. A formula whose result is used
elsewhere counts as a read.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import batchnorm, instancenorm
from torch.overrides import TorchFunctionMode
from torch.utils.weak import TensorWeakRef
from typing_extensions import override

from paceline.parallel.batchnorm.norm_kernel_calls import KernelWatch, is_norm_function
from paceline.torch_internals.private_api import BufferAccessObserver, NormBase, is_in_backward, storage_key

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_METADATA_NAMES = frozenset(
    ("size", "dim", "numel", "stride", "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad")
) | frozenset(
    ("is_cuda", "is_meta", "is_floating_point", "is_complex", "is_contiguous", "is_sparse", "data_ptr", "get_device")
)
"""Names of tensor attributes and methods that don't read the tensor's values."""
_TORCH_NORM_FILES = frozenset(module.__file__ for module in (batchnorm, instancenorm))


class StatisticsReads(TorchFunctionMode):
    """A function mode for one forward or backward that calls `on_read(norm)` if user code reads a norm's statistics.

    `is_inside(norm)` returns whether a call of the norm, or one of its hooks, is running. Call `finish_call(norm)` when
    the call ends: a value that was computed from the statistics and is still alive then counts as a read.
    """

    def __init__(
        self,
        norms: Iterable[NormBase],
        *,
        is_inside: Callable[[NormBase], bool],
        on_read: Callable[[NormBase], None],
    ) -> None:
        super().__init__()
        self._all_norms = list(norms)
        self._norm_by_storage: dict[int, NormBase] = {}
        self._is_inside, self._on_read = is_inside, on_read
        # tensors that a norm's call computed from its statistics, by id, with the norm
        self._derived: dict[int, tuple[TensorWeakRef, NormBase]] = {}
        self._find_storages()

    def finish_call(self, norm: NormBase) -> None:
        """End a call of the norm; report a read if a value computed from its statistics outlives the call."""
        self._find_storages()  # the norm may have assigned new tensors
        for key, (reference, source) in list(self._derived.items()):
            if source is norm:
                tensor = reference()
                if tensor is not None and _storage_key(tensor) not in self._norm_by_storage:
                    self._on_read(norm)
                del self._derived[key]

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Report the norms whose statistics `func` reads, then run `func`."""
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        if (
            torch.compiler.is_compiling()
            or _function_name(func) in _METADATA_NAMES
            or _is_package_code(caller)
            or _is_forwarded(caller)
        ):
            return func(*args, **kwargs)
        norms = self._source_norms((*args, *kwargs.values()))
        inside = [norm for norm in norms if self._is_inside(norm)]
        for norm in norms:
            if norm not in inside:
                self._on_read(norm)
        result = func(*args, **kwargs)
        if inside and not is_norm_function(func):
            self._record_derived(result, inside[0])
        return result

    def _record_derived(self, result: Any, norm: NormBase) -> None:
        """Record a result that the norm's call computed from its statistics; a Python number counts as a read."""
        tensors = list(_find_tensors((result,)))
        if not tensors and result is not None and _caller_file() not in _TORCH_NORM_FILES:
            self._on_read(norm)
        for tensor in tensors:
            if _storage_key(tensor) not in self._norm_by_storage:
                self._derived[id(tensor)] = (TensorWeakRef(tensor), norm)

    def _source_norms(self, values: Iterable[Any]) -> list[NormBase]:
        return [norm for tensor in _find_tensors(values) if (norm := self._source_norm(tensor)) is not None]

    def _source_norm(self, tensor: Tensor) -> NormBase | None:
        if (norm := self._norm_by_storage.get(_storage_key(tensor))) is not None:
            return norm
        reference, norm = self._derived.get(id(tensor), (None, None))
        return norm if reference is not None and reference() is tensor else None

    def _find_storages(self) -> None:
        statistics = [(getattr(norm, name), norm) for norm in self._all_norms for name in STATISTICS]
        self._norm_by_storage = {_storage_key(tensor): norm for tensor, norm in statistics if tensor is not None}


class StatisticsAccesses:
    """An observer of user code that accesses the statistics of norms while `is_armed`.

    Observation costs a fraction of a microsecond per access, so it is always on, unlike `StatisticsReads`. Every access
    sets `has_access`. The first access of each place in the code also sets `has_new_access`, after which the owner of
    this observer detects reads with `StatisticsReads`, and clears both flags. On some devices `StatisticsReads` does
    not work in backward. So the first access of each place in a backward counts as a read: `on_read(norm)` is called.
    """

    def __init__(self, norms: Iterable[NormBase], *, on_read: Callable[[NormBase], None]) -> None:
        self.is_armed = self.has_new_access = self.has_access = False
        self._known_places: set[tuple[Any, int]] = set()
        self._on_read = on_read
        self._accesses = [
            BufferAccessObserver(norm, names=STATISTICS, on_access=partial(self._on_access, norm)) for norm in norms
        ]

    def close(self) -> None:
        """Stop watching."""
        for access in self._accesses:
            access.close()

    def _on_access(self, norm: NormBase, code: CodeType, instruction: int) -> None:
        if not self.is_armed or code.co_filename in _TORCH_NORM_FILES or code.co_filename.startswith(_PACKAGE_FOLDER):
            return
        self.has_access = True
        if (code, instruction) not in self._known_places:
            self._known_places.add((code, instruction))
            self.has_new_access = True
            if is_in_backward():
                self._on_read(norm)


def _caller_file() -> str:
    """Return the file of the code that called the watched function, skipping this package's modes."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE_FOLDER):
        frame = frame.f_back
    return frame.f_code.co_filename


def _is_package_code(frame: FrameType) -> bool:
    """Return whether code of this package calls the function, except for the mode that forwards a user's call."""
    code = frame.f_code
    return code.co_filename.startswith(_PACKAGE_FOLDER) and code is not KernelWatch.__torch_function__.__code__


def _is_forwarded(frame: FrameType | None) -> bool:
    """Return whether a dispatch mode forwards an operation to its kernel.

    Such an operation needs no further check. Either the call of the operation has already been checked, or it is part
    of a norm's own backward, where reads of statistics are allowed.
    """
    caller = frame
    while caller is not None and caller.f_code.co_filename == _TORCH_OPS_FILE:
        caller = caller.f_back
    return caller is not None and caller is not frame and caller.f_code.co_name == "__torch_dispatch__"


_TORCH_OPS_FILE = torch._ops.__file__
_PACKAGE_FOLDER = __file__.rpartition("parallel")[0]


def _storage_key(tensor: Tensor) -> int:
    """Return a key that is equal for all views of a tensor."""
    return storage_key(tensor) if type(tensor) is Tensor and tensor.layout is torch.strided else id(tensor)


def _function_name(func: Any) -> str:
    """Return a function's name; for an attribute access, a call of `__get__`, return the attribute's name."""
    name = str(getattr(func, "__name__", ""))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name == "__get__" else name


def _find_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _find_tensors(value)
