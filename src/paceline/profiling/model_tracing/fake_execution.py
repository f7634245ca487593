"""Fake execution: a model runs with true shapes and memory addresses, and without computing values.

Results are allocated and never written, so that the system provides no physical memory for them. A step of a model of
any size takes some seconds and little memory.

Integers, booleans and small tensors are still computed if their inputs are known. So code that branches on them takes
its usual path. Integers and booleans that depend on unknown numbers get plausible values: every number counts as
finite, and all experts get equally many tokens. Python numbers get plausible values too: `loss.item()` returns 1.0.
"""

import math
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from typing_extensions import override

from paceline.errors import user_code_position
from paceline.profiling.model_tracing.fake_op_results import (
    COMPARISONS,
    FIXED_RESULTS,
    PACKED_SEQUENCE_OPERATIONS,
    RANDOM_MASKS,
    fill_unknown_integers,
    packed_sequence_form,
    result_shapes,
    unknown_result_error,
)
from paceline.torch_internals.dispatch_modes import (
    DispatchMode,
    PendingCollective,
    hide_from_modes,
    op_name,
    run_cpu_kernel,
    written_tensors,
)
from paceline.torch_internals.pytree import tensor_leaves

# floating-point tensors with at most so many elements are computed: in a step, and while a model is built
SMALL_ELEMENTS, _SMALL_ELEMENTS_IN_BUILD = 64, 1 << 12
_SMALL_FLOAT64_ELEMENTS = 1 << 16  # larger, because ranks exchange statistics of a step in float64
_endless_locations: set[object] = set()  # lines of code whose comparison was true _MAX_TRUE_RESULTS times
_MAX_TRUE_RESULTS, _MAX_TRUE_RESULTS_IF_ENDLESS = 10_000, 100  # of a comparison at one line of code
_FRESH_BYTES = 64 << 20  # allocations of at least this size come from the system, filled with zeros
_META = torch.device("meta")
_VIEWS = {"aten::detach", "aten::alias", "aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh"}
_RESIZING_OPERATIONS = ("aten::resize_", "aten::set_")
# operations that are run; a collective (c10d::) with fake inputs is run on empty tensors, see `_fake_collective`
_EXECUTED_PREFIXES = ("c10d::", "profiler::", "prim::")
_TensorForm = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, strides, dtype


class FakeStorages:
    """A set of storages whose values are unknown. Several threads may share the set."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}

    def has(self, tensor: Tensor) -> bool:
        """Return whether the tensor's values are unknown. A sparse tensor has no storage, so return False for it."""
        return tensor.layout == torch.strided and id(tensor.untyped_storage()) in self._storages

    def add(self, tensor: Tensor) -> None:
        """Mark the tensor's values as unknown."""
        storage = tensor.untyped_storage()
        storage_id = id(storage)
        if storage_id not in self._storages:
            self._storages[storage_id] = weakref.ref(storage, lambda _: self._storages.pop(storage_id, None))


class FakeExecutionMode(DispatchMode):
    """A dispatch mode in which this thread's operations return tensors without values.

    Threads that pass tensors to each other share `fake_storages`. `on_operation` is called with each operation, its
    `args` and `kwargs`, and its result. `backend_copies` returns how many bytes the backend copies for a collective,
    and which tensors the backend references. Both last until the collective is waited for.
    """

    def __init__(
        self,
        *,
        fake_storages: FakeStorages | None = None,
        on_operation: Callable[[Any, Any, Any, Any], None] | None = None,
        backend_copies: Callable[[Any, Any], tuple[int, Any]] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._backend_copies = backend_copies
        self.copied_bytes = 0
        """The bytes of the backend's copies for collectives that are still pending."""
        self._on_operation = on_operation
        self._fake_storages = fake_storages or FakeStorages()
        self.comparisons_are_true = True
        """The result of `>`, `>=`, `<` and `<=` for unknown numbers, except in an endless loop.

        Set it to False while a model is built.
        """
        self._known_forms: dict[Any, Any] = {}  # of results, by operation and forms of its arguments
        self._remaining_true_results: dict[Any, int] = {}  # by line of code

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation without computing values, and call `on_operation`."""
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        result = self._run(func, args, kwargs)
        if self._on_operation is not None:
            self._on_operation(func, args, kwargs, result)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        inputs = list(tensor_leaves((args, kwargs)))
        has_fake_input = any(map(self._fake_storages.has, inputs))
        name = op_name(func)
        if _is_on_meta(inputs, kwargs):
            return func(*args, **kwargs)
        if name.startswith("c10d::") and has_fake_input:
            return self._fake_collective(func, args, kwargs)
        if _is_view(func) or name.startswith(_EXECUTED_PREFIXES):
            result = func(*args, **kwargs)
            for tensor in tensor_leaves(result) if has_fake_input else ():
                self._fake_storages.add(tensor)
            return result
        if name.startswith("fsdp::"):  # implemented in Python: its operations are dispatched one by one
            with self:
                return run_cpu_kernel(func, args, kwargs)
        if name in FIXED_RESULTS:
            return FIXED_RESULTS[name](func, args, kwargs) if has_fake_input else func(*args, **kwargs)
        if _is_inplace_view(func) and name not in _RESIZING_OPERATIONS:  # values in memory do not change
            return func(*args, **kwargs)
        targets = written_tensors(func, args, kwargs)
        if not has_fake_input and not self._is_large(func, args, kwargs, inputs, targets):
            return func(*args, **kwargs)
        if targets:
            return self._fake_write(func, args, kwargs, targets)
        return self._fake_results(func, args, kwargs)

    def _fake_collective(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run the collective on empty tensors, so that ranks still wait for each other. `args[0]` has its results."""
        has_split_sizes = op_name(func) == "c10d::alltoall_base_"  # the lists among its arguments are split sizes
        arguments = [[] if has_split_sizes and isinstance(arg, list) else arg for arg in args]
        empty_arguments = _map_tensors(arguments, lambda tensor: tensor.new_empty(0))
        result = func(*empty_arguments, **kwargs)
        for tensor in tensor_leaves(args[0]):
            self._fake_storages.add(tensor)
        if not isinstance(result, tuple):
            return result
        return (
            args[0],
            result[1] if self._backend_copies is None else self._pending_collective(*self._backend_copies(func, args)),
        )

    def _pending_collective(self, num_bytes: int, kept_tensors: Any) -> Any:
        """Return a collective that references tensors, and has copies of `num_bytes`, until it is waited for."""

        def on_completion() -> None:
            self.copied_bytes -= num_bytes

        self.copied_bytes += num_bytes
        return PendingCollective(on_completion, inputs=kept_tensors).start()

    def _is_large(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
        """Return whether the operation computes or reads so many floating-point numbers that it is not run."""
        if targets or inputs:
            tensors = targets or inputs
            if any(self._is_too_large(tensor) for tensor in tensors):
                return True
            # a lookup may read many rows of a small table
            is_lookup = not targets and any(tensor.is_floating_point() for tensor in inputs)
            return is_lookup and any(tensor.numel() > _SMALL_ELEMENTS_IN_BUILD for tensor in inputs)
        size = next((arg for arg in args if isinstance(arg, list | tuple | torch.Size)), ())
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return (
            dtype.is_floating_point
            and all(isinstance(n, int) for n in size)
            and math.prod(size) > self._max_computed_elements
        )

    @property
    def _max_computed_elements(self) -> int:
        """The number of elements up to which a tensor's values are computed.

        It is larger while a model is built, because constructors may test small matrices.
        """
        return SMALL_ELEMENTS if self.comparisons_are_true else _SMALL_ELEMENTS_IN_BUILD

    def _is_too_large(self, tensor: Tensor) -> bool:
        max_elements = _SMALL_FLOAT64_ELEMENTS if tensor.dtype is torch.float64 else self._max_computed_elements
        return tensor.is_floating_point() and tensor.numel() > max_elements

    def _fake_write(self, func: Any, args: Any, kwargs: Any, targets: Sequence[Tensor]) -> Any:
        """Mark the written numbers as unknown, or fill them if they are integers. Return the operation's result."""
        for tensor in targets:
            if tensor.is_floating_point() or tensor.is_complex():
                self._fake_storages.add(tensor)
            elif tensor.dtype is not torch.uint8 or tensor.numel() <= SMALL_ELEMENTS:
                fill_unknown_integers(func, tensor, args, comparisons_are_true=self._comparison_result(func, tensor))
        if op_name(func) in _RESIZING_OPERATIONS:
            return func(*args, **kwargs)
        result = targets if len(func._schema.returns) > 1 else targets[0]
        return result if func._schema.returns else None

    def _fake_results(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return new tensors with the shapes of the operation's results."""
        if op_name(func) == "aten::masked_select":
            return self._create_results(func, args, _masked_select_form(*args))
        if op_name(func) in PACKED_SEQUENCE_OPERATIONS:
            form, lengths = packed_sequence_form(func, args, kwargs)
            return self._create_results(func, args, form), lengths
        args, kwargs = _masks_to_indices(func, args), dict(kwargs)
        key = (func, _key(args), _key(sorted(kwargs.items())) if kwargs else ())
        if key not in self._known_forms:
            self._known_forms[key] = _tensor_forms(self._meta_results(func, args, kwargs))
        return self._create_results(func, args, self._known_forms[key])

    def _comparison_result(self, func: Any, tensor: Tensor) -> bool:
        """Return the result of a comparison of unknown numbers: `comparisons_are_true`, or False in an endless loop.

        A loop counts as endless if one line of user code has compared a single number too often.
        """
        if not self.comparisons_are_true or tensor.numel() != 1 or op_name(func) not in COMPARISONS:
            return self.comparisons_are_true
        location = user_code_position()
        self._remaining_true_results[location] = (
            self._remaining_true_results.get(
                location, _MAX_TRUE_RESULTS_IF_ENDLESS if location in _endless_locations else _MAX_TRUE_RESULTS
            )
            - 1
        )
        if self._remaining_true_results[location] > 0:
            return True
        del self._remaining_true_results[location]
        _endless_locations.add(location)
        return False

    def _meta_results(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the operation's results on meta tensors, which have shapes only."""
        meta_kwargs = {**kwargs, "device": _META} if any(a.name == "device" for a in func._schema.arguments) else kwargs
        try:
            with hide_from_modes():
                return result_shapes(func, _map_tensors(args, _as_meta), _map_tensors(meta_kwargs, _as_meta))
        except RuntimeError as error:  # or its subclass NotImplementedError
            if not isinstance(error, NotImplementedError) and _is_builtin(func):
                raise  # the same error as with real values
            raise unknown_result_error(func, error) from error

    def _create_results(self, func: Any, args: Any, forms: Any) -> Any:
        def make(form: _TensorForm) -> Tensor:
            shape, stride, dtype = form
            tensor = torch.empty_strided(shape, stride, dtype=dtype)
            if dtype.is_floating_point or dtype.is_complex:
                self._fake_storages.add(tensor)
            elif op_name(func) not in RANDOM_MASKS or tensor.nbytes < _FRESH_BYTES:
                fill_unknown_integers(func, tensor, args, comparisons_are_true=self._comparison_result(func, tensor))
            return tensor

        return _rebuild(forms, make)


def _is_on_meta(inputs: Sequence[Tensor], kwargs: Any) -> bool:
    """Return whether the operation reads or creates meta tensors."""
    if any(tensor.is_meta for tensor in inputs):
        return True
    device = kwargs.get("device")
    return device is not None and torch.device(device).type == "meta"


@cache
def _is_inplace_view(func: Any) -> bool:
    """Return whether the operation changes a tensor's view of its memory in place."""
    return torch.Tag.inplace_view in func.tags


@cache
def _is_view(func: Any) -> bool:
    """Return whether the operation's results share the memory of its inputs."""
    schema = func._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return False
    return any(r.alias_info is not None for r in schema.returns) or schema.name in _VIEWS


def _masks_to_indices(func: Any, args: Any) -> Any:
    """Return the arguments of an indexing operation with masks converted to indices. The values of masks are known."""
    if op_name(func) not in ("aten::index", "aten::index_put") or len(args) < 2:
        return args
    indices: list[Any] = []
    for index in args[1]:
        if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
            indices += index.nonzero().unbind(1)
        else:
            indices.append(index)
    return (args[0], indices, *args[2:])


def _masked_select_form(tensor: Tensor, mask: Tensor) -> _TensorForm:
    """Return the form of the result of `masked_select`. It depends on the values of the mask, which are known."""
    repeats = torch.broadcast_shapes(tensor.shape, mask.shape).numel() // max(1, mask.numel())
    return ((int(mask.sum()) * repeats,), (1,), tensor.dtype)


def _is_builtin(func: Any) -> bool:
    return bool(op_name(func).startswith(("aten::", "prims::", "prim::")))


def _as_meta(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _map_tensors(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_map_tensors(part, change) for part in value) if type(value) in (list, tuple) else value
    if isinstance(value, dict):
        return {name: _map_tensors(part, change) for name, part in value.items()}
    return value


def _key(value: Any) -> Any:
    """Return a hashable key of nested arguments. Equal keys mean that results have equal forms."""
    if isinstance(value, Tensor):
        return (value.shape, value.stride(), value.dtype)
    if isinstance(value, list | tuple):
        return tuple([_key(part) for part in value])
    return (type(value), str(value)) if isinstance(value, torch.Generator) else (type(value), value)


def _tensor_forms(value: Any) -> Any:
    """Return a nested result with each tensor replaced by its form (shape, strides, dtype)."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), tuple(value.stride()), value.dtype)
    return [_tensor_forms(part) for part in value] if isinstance(value, list | tuple) else value


def _rebuild(forms: Any, make: Callable[[_TensorForm], Tensor]) -> Any:
    """Return a nested result with each form replaced by a new tensor."""
    if isinstance(forms, tuple):
        return make(forms)
    return tuple(_rebuild(form, make) for form in forms) if isinstance(forms, list) else forms
