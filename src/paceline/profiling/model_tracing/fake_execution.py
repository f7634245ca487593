"""Fake execution: a model runs with true shapes and memory addresses, and without computing values.

Results are allocated and never written, so that the system provides no memory for them: a step of a model of any size
takes some seconds and little memory. Integers, booleans and small tensors with known inputs keep their values, so that
code that branches on them takes its usual path. Results that depend on unknown numbers get plausible values: a loss is
one, everything is finite, experts get equally many tokens.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from paceline.errors import place_now
from paceline.profiling.model_tracing.fake_op_results import (
    ANSWERS,
    COMPARES,
    DRAWN,
    PACKED,
    fill_unknown_integers,
    packed_sequence_form,
    result_shapes,
    unknown_result_error,
)
from paceline.torch_internals.dispatch_modes import (
    DispatchMode,
    PendingCollective,
    hide_from_modes,
    name_of,
    on_cpu,
    written_tensors,
)
from paceline.torch_internals.pytree import tensor_leaves

SMALL, _SMALL_BUILT = 64, 1 << 12
_SMALL_DOUBLES = 1 << 16  # ranks exchange statistics of a step in float64
_endless: set[object] = set()
_ENDLESS, _KNOWN_ENDLESS = 10_000, 100  # of a comparison at one line of code
_FRESH = 64 << 20  # larger allocations come from the system, filled with zeros
_META = torch.device("meta")
_VIEWS = {"aten::detach", "aten::alias", "aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"}
_RESIZED = ("aten::resize_", "aten::set_")
_PASSED = ("c10d::", "profiler::", "prim::")
_Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]


class FakeStorages:
    """The storages whose values are unknown, over all threads."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}

    def has(self, tensor: Tensor) -> bool:
        """Return whether the tensor's values are unknown; never for a sparse tensor, which has no own storage."""
        return tensor.layout == torch.strided and id(tensor.untyped_storage()) in self._storages

    def add(self, tensor: Tensor) -> None:
        """Mark the tensor's values as unknown."""
        storage = tensor.untyped_storage()
        place = id(storage)
        if place not in self._storages:
            self._storages[place] = weakref.ref(storage, lambda _: self._storages.pop(place, None))


class FakeExecutionMode(DispatchMode):
    """A dispatch mode in which this thread's operations return tensors without values; `on_operation` gets each one.

    Threads that pass tensors to each other share `fake_storages`. `backend_copies` returns how many bytes the backend
    copies for a collective, and which of its tensors it keeps, both until the collective is waited for.
    """

    def __init__(
        self,
        *,
        emptied: FakeStorages | None = None,
        see: Callable[[Any, Any, Any, Any], None] | None = None,
        copies: Callable[[Any, Any], tuple[int, Any]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._copies = copies
        self.copied_bytes = 0
        """The bytes of the backend's copies for collectives that are still pending."""
        self._see = see
        self._emptied = emptied or FakeStorages()
        self.holds = True
        """The result of comparisons of unknown numbers; False while a model is built."""
        self._known: dict[Any, Any] = {}
        self._left: dict[Any, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the operation's results without their values."""
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = self._run(func, args, kwargs)
        if self._see is not None:
            self._see(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        given = list(tensor_leaves((args, kwargs)))
        hollow = any(map(self._emptied.has, given))
        name = name_of(func)
        if _is_on_meta(given, kwargs):
            return func(*args, **kwargs)
        if name.startswith("c10d::") and hollow:
            return self._told(func, args, kwargs)
        if _is_view(func) or name.startswith(_PASSED):
            result = func(*args, **kwargs)
            for tensor in tensor_leaves(result) if hollow else ():
                self._emptied.add(tensor)
            return result
        if name.startswith("fsdp::"):  # implemented in Python: its operations are dispatched one by one
            with self:
                return on_cpu(func, args, kwargs)
        if name in ANSWERS:
            return ANSWERS[name](func, args, kwargs) if hollow else func(*args, **kwargs)
        if _is_placed_otherwise(func) and name not in _RESIZED:  # its values do not change
            return func(*args, **kwargs)
        targets = written_tensors(func, args, kwargs)
        if not hollow and not self._is_large(func, args, kwargs, given, targets):
            return func(*args, **kwargs)
        if targets:
            return self._wrote(func, args, kwargs, targets)
        return self._made(func, args, kwargs)

    def _told(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the collective on empty tensors instead; its first argument holds the results."""
        rows = name_of(func) == "c10d::alltoall_base_"  # its lists are the split sizes
        given = [[] if rows and isinstance(arg, list) else arg for arg in args]
        nothing = _mapped(given, lambda tensor: tensor.new_empty(0))
        result = func(*nothing, **kwargs)
        for tensor in tensor_leaves(args[0]):
            self._emptied.add(tensor)
        if not isinstance(result, tuple):
            return result
        return (args[0], result[1] if self._copies is None else self._under_way(*self._copies(func, args)))

    def _under_way(self, num_bytes: int, keeps: Any) -> Any:
        def arrived() -> None:
            self.copied_bytes -= num_bytes

        self.copied_bytes += num_bytes
        return PendingCollective(arrived, keeps=keeps).begin()

    def _is_large(self, func: Any, args: Any, kwargs: Any, given: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
        """Return whether the operation computes too many floating-point numbers to be worth running."""
        if targets or given:
            among = targets or given
            if any(self._is_worth_leaving(tensor) for tensor in among):
                return True
            picks = not targets and any(tensor.is_floating_point() for tensor in given)  # such as rows of a small table
            return picks and any(tensor.numel() > _SMALL_BUILT for tensor in given)
        size = next((arg for arg in args if isinstance(arg, list | tuple | torch.Size)), ())
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return dtype.is_floating_point and all(isinstance(n, int) for n in size) and math.prod(size) > self._small

    @property
    def _small(self) -> int:
        """The largest tensor whose values are computed: a build tests its rules on small matrices."""
        return SMALL if self.holds else _SMALL_BUILT

    def _is_worth_leaving(self, tensor: Tensor) -> bool:
        most = _SMALL_DOUBLES if tensor.dtype is torch.float64 else self._small
        return tensor.is_floating_point() and tensor.numel() > most

    def _wrote(self, func: Any, args: Any, kwargs: Any, targets: Sequence[Tensor]) -> Any:
        for tensor in targets:
            if tensor.is_floating_point() or tensor.is_complex():
                self._emptied.add(tensor)
            elif tensor.dtype is not torch.uint8 or tensor.numel() <= SMALL:
                fill_unknown_integers(func, tensor, args, holds=self._holds(func, tensor))
        if name_of(func) in _RESIZED:
            return func(*args, **kwargs)
        given = targets if len(func._schema.returns) > 1 else targets[0]
        return given if func._schema.returns else None

    def _made(self, func: Any, args: Any, kwargs: Any) -> Any:
        if name_of(func) == "aten::masked_select":
            return self._given(func, args, _selected(*args))
        if name_of(func) in PACKED:
            form, lengths = packed_sequence_form(func, args, kwargs)
            return self._given(func, args, form), lengths
        args, kwargs = _without_masks(func, args), dict(kwargs)
        key = (func, _key(args), _key(sorted(kwargs.items())) if kwargs else ())
        if key not in self._known:
            self._known[key] = _forms(self._shaped(func, args, kwargs))
        return self._given(func, args, self._known[key])

    def _holds(self, func: Any, tensor: Tensor) -> bool:
        """Return the result of an unknown comparison: True, or False if a loop repeats it endlessly."""
        if not self.holds or tensor.numel() != 1 or name_of(func) not in COMPARES:
            return self.holds
        place = place_now()
        self._left[place] = self._left.get(place, _KNOWN_ENDLESS if place in _endless else _ENDLESS) - 1
        if self._left[place] > 0:
            return True
        del self._left[place]
        _endless.add(place)
        return False

    def _shaped(self, func: Any, args: Any, kwargs: Any) -> Any:
        on_meta = {**kwargs, "device": _META} if any(a.name == "device" for a in func._schema.arguments) else kwargs
        try:
            with hide_from_modes():
                return result_shapes(func, _mapped(args, _as_meta), _mapped(on_meta, _as_meta))
        except RuntimeError as error:  # or its subclass NotImplementedError
            if not isinstance(error, NotImplementedError) and _is_builtin(func):
                raise  # the same error as with real values
            raise unknown_result_error(func, error) from error

    def _given(self, func: Any, args: Any, forms: Any) -> Any:
        def make(form: _Form) -> Tensor:
            shape, stride, dtype = form
            tensor = torch.empty_strided(shape, stride, dtype=dtype)
            if dtype.is_floating_point or dtype.is_complex:
                self._emptied.add(tensor)
            elif name_of(func) not in DRAWN or tensor.nbytes < _FRESH:
                fill_unknown_integers(func, tensor, args, holds=self._holds(func, tensor))
            return tensor

        return _rebuilt(forms, make)


def _is_on_meta(given: Sequence[Tensor], kwargs: Any) -> bool:
    """Return whether the operation runs on meta tensors."""
    if any(tensor.is_meta for tensor in given):
        return True
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


@cache
def _is_placed_otherwise(func: Any) -> bool:
    """Return whether the operation changes a tensor's view of its memory in place."""
    return torch.Tag.inplace_view in func.tags


@cache
def _is_view(func: Any) -> bool:
    """Return whether its results share the memory of its inputs."""
    schema = func._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return False
    return any(r.alias_info is not None for r in schema.returns) or schema.name in _VIEWS


def _without_masks(func: Any, args: Any) -> Any:
    """Return the arguments with masks converted to indices; the values of masks are known."""
    if name_of(func) not in ("aten::index", "aten::index_put") or len(args) < 2:
        return args
    found: list[Any] = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            found += index.nonzero().unbind(1)
        else:
            found.append(index)
    return (args[0], found, *args[2:])


def _selected(tensor: Tensor, mask: Tensor) -> _Form:
    """Return the form of a masked selection: as many elements as the mask, whose values are known, selects."""
    times = torch.broadcast_shapes(tensor.shape, mask.shape).numel() // max(1, mask.numel())
    return ((int(mask.sum()) * times,), (1,), tensor.dtype)


def _is_builtin(func: Any) -> bool:
    return bool(name_of(func).startswith(("aten::", "prims::", "prim::")))


def _as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(part, change) for part in value) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {name: _mapped(part, change) for name, part in value.items()}
    return value


def _key(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple([_key(part) for part in value])
    return (type(value), str(value)) if isinstance(value, torch.Generator) else (type(value), value)


def _forms(value: Any) -> Any:
    """Return what is needed to recreate the tensors of a result: shape, strides and dtype."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype)
    return [_forms(part) for part in value] if isinstance(value, list | tuple) else value


def _rebuilt(forms: Any, make: Callable[[_Form], Tensor]) -> Any:
    if isinstance(forms, tuple):
        return make(forms)
    return tuple(_rebuilt(form, make) for form in forms) if isinstance(forms, list) else forms
