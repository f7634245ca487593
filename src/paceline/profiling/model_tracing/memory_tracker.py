"""Measure a rank's memory in a step: parameters, gradients, optimizer state, buffers, and all other tensors."""

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import repeat
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from typing_extensions import override

from paceline.torch_internals.dispatch_modes import DispatchMode, observe_storage_resizes, op_name
from paceline.torch_internals.private_api import is_in_backward
from paceline.torch_internals.pytree import tensor_leaves

_GRADIENT = attrgetter("grad")
KINDS = ("parameters", "gradients", "optimizer", "buffers", "activations")


@dataclass(frozen=True, kw_only=True)
class MemoryByKind:
    """The bytes of each kind on this rank.

    `activations` is everything else, including gathered weights and the workspace of operators.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    buffers: int = 0
    activations: int = 0

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(getattr(self, field.name) for field in fields(self))

    def as_json(self) -> dict[str, int]:
        """Return the bytes by kind, and `total`."""
        return {**asdict(self), "total": self.total}


def memory_at_rest(
    *, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = (), updated_tensors: Sequence[Tensor] = ()
) -> MemoryByKind:
    """Return this rank's bytes between two steps, without padding. Memory that tensors share counts once.

    `updated_tensors` are the tensors that the optimizers update, if these are not the model's parameters but slices
    of them.
    """
    parameters = list(model.parameters())
    return MemoryByKind(
        parameters=element_bytes(parameters),
        gradients=element_bytes([p.grad for p in [*parameters, *updated_tensors] if p.grad is not None]),
        optimizer=element_bytes(list(optimizer_state_tensors(optimizers))),
        buffers=element_bytes(list(model.buffers())),
    )


def element_bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors' elements on this rank. Shared or expanded memory counts once."""
    sizes: dict[int, tuple[int, dict[tuple[int, torch.Size], int]]] = {}
    for tensor in map(local_tensor, tensors):
        if tensor.is_meta:  # the memory is on another rank
            continue
        storage = tensor.untyped_storage()
        _, views = sizes.setdefault(id(storage), (storage.nbytes(), {}))
        views[(int(tensor.storage_offset()), tensor.shape)] = tensor.numel() * tensor.element_size()
    return sum(min(size, sum(views.values())) for size, views in sizes.values())


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a distributed tensor, or the tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        shard: Tensor = tensor.to_local()
    return shard


def optimizer_state_tensors(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Yield the tensors of the optimizers' states."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from _counted_tensors(state)


@dataclass
class _LiveStorage:
    """A storage that is not freed yet."""

    num_bytes: int
    kind: str
    reference: "weakref.ref[UntypedStorage]"


class StorageTracker:
    """A tracker of the storages that operations have created and that are not freed yet."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}
        self._is_finished = False

    def observe(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the new storages of an operation's results. A view of an input has none."""
        if self._is_finished:
            return
        for storage in _new_storages(result, self._storages, args, kwargs):
            storage_id = id(storage)
            self._storages[storage_id] = weakref.ref(storage, partial(self._forget, storage_id))

    def _forget(self, storage_id: int, _: object) -> None:
        self._storages.pop(storage_id, None)

    def finish(self) -> list[UntypedStorage]:
        """Stop tracking, and return the storages that are not freed yet."""
        self._is_finished = True
        storages = [reference() for reference in list(self._storages.values())]
        return [storage for storage in storages if storage is not None]


class MemoryTracker(DispatchMode):
    """A tracker of this rank's peak memory and its composition, for one kind of device.

    Every result of an operation is tracked until its memory is freed. Storages that `fully_shard` resizes are tracked
    too. Use it around a step that is not the first, because the optimizer's state must exist. `updated_tensors` are as
    in `memory_at_rest`. Those that do not share memory with parameters count as optimizer state. `other_storages` exist
    already and count as activations.

    `operator_bytes` returns the peak bytes of an operation while it runs, including its results. `extra_bytes` returns
    the bytes that exist in addition to tensors. `on_operation` gets each operation's name and the bytes of each kind at
    this time. `on_phase_change` is called when a backward begins or ends.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        updated_tensors: Sequence[Tensor] = (),
        other_storages: Iterable[UntypedStorage] = (),
        device: str = "cpu",
        operator_bytes: Callable[[Any, Any], int] | None = None,
        extra_bytes: Callable[[], int] | None = None,
        on_operation: Callable[[str, tuple[int, ...]], None] | None = None,
        on_phase_change: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._operator_bytes, self._extra_bytes = device, operator_bytes, extra_bytes
        self._on_operation, self._on_phase_change = on_operation, on_phase_change
        self._parameters = list({id(p): p for p in (*model.parameters(), *updated_tensors)}.values())
        self._bytes = dict.fromkeys(KINDS, 0)
        self._live: dict[int, _LiveStorage] = {}
        self._without_gradient = [p for p in self._parameters if p.requires_grad]
        self._was_backward = False
        self._exits = ExitStack()
        self._peak_bytes = 0
        self.peak = MemoryByKind()
        """The bytes of each kind when their sum was highest."""
        self.kept_bytes = 0
        """The bytes of activations when a backward began: the maximum over the microbatches."""
        for kind, tensors in self._initial_tensors(model, optimizers, updated_tensors):
            for tensor in tensors:
                self._track(local_tensor(tensor).untyped_storage(), kind)
        for storage in other_storages:
            self._track(storage, "activations")

    @override
    def __enter__(self) -> "MemoryTracker":
        self._exits.enter_context(observe_storage_resizes(self._on_resize))
        self._update_peak("begun")
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        self._exits.close()
        self._live.clear()

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, track its results, and update the peak."""
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented
        backward = is_in_backward()
        if backward and not self._was_backward:
            self.kept_bytes = max(self.kept_bytes, self._bytes["activations"])
        if self._was_backward and not backward:
            self._reclassify_gradients()
            self._without_gradient = [p for p in self._parameters if p.requires_grad]
        if backward != self._was_backward and self._on_phase_change is not None:
            self._on_phase_change()
        self._was_backward = backward
        name = op_name(func)
        if self._operator_bytes is not None:
            self._update_peak(name, self._operator_bytes(func, args))
        result = func(*args, **(kwargs or {}))
        for storage in _new_storages(result, self._live, args, kwargs):
            self._track(storage, "activations")
        # Gradients are set between operations, so one look for them per operation is enough. With `operator_bytes`, the
        # call of `_update_peak` above has done it.
        self._update_peak(name, may_have_gradients=self._operator_bytes is None)
        return result

    def _initial_tensors(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], updated_tensors: Sequence[Tensor]
    ) -> Iterator[tuple[str, list[Tensor]]]:
        yield "parameters", list(model.parameters())
        yield "gradients", [p.grad for p in self._parameters if p.grad is not None]
        yield "optimizer", [*optimizer_state_tensors(optimizers), *updated_tensors]
        yield "buffers", list(model.buffers())

    def _track(self, storage: UntypedStorage, kind: str) -> None:
        storage_id = id(storage)
        if storage_id in self._live or storage.device.type != self._device:
            return
        reference = weakref.ref(storage, lambda _: self._forget(storage_id))
        self._live[storage_id] = _LiveStorage(storage.nbytes(), kind, reference)
        self._bytes[kind] += storage.nbytes()

    def _forget(self, storage_id: int) -> None:
        live = self._live.pop(storage_id, None)
        if live is not None:
            self._bytes[live.kind] -= live.num_bytes

    def _on_resize(self, storage: UntypedStorage) -> None:
        live = self._live.get(id(storage))
        if live is None:
            self._track(storage, "activations")
        else:
            self._bytes[live.kind] += storage.nbytes() - live.num_bytes
            live.num_bytes = storage.nbytes()
        self._update_peak("resized")

    def _reclassify_gradients(self) -> None:
        """Count activations that have become gradients as gradients."""
        if all(map(is_, map(_GRADIENT, self._without_gradient), repeat(None))):  # true after most operations
            return
        remaining = [parameter for parameter in self._without_gradient if parameter.grad is None]
        for gradient in (parameter.grad for parameter in self._without_gradient):
            if gradient is None:
                continue
            live = self._live.get(id(local_tensor(gradient).untyped_storage()))
            if live is not None and live.kind == "activations":
                self._bytes["activations"] -= live.num_bytes
                self._bytes["gradients"] += live.num_bytes
                live.kind = "gradients"
        self._without_gradient = remaining

    def _update_peak(self, name: str, operator_bytes: int = 0, *, may_have_gradients: bool = True) -> None:
        """Update the peak, and call `on_operation`.

        `may_have_gradients` says whether gradients may have been set since the last call.
        """
        operator_bytes += 0 if self._extra_bytes is None else self._extra_bytes()
        total = sum(self._bytes.values()) + operator_bytes
        is_peak = total > self._peak_bytes
        if may_have_gradients and self._was_backward and (is_peak or self._on_operation is not None):
            self._reclassify_gradients()
        if is_peak:
            self._peak_bytes = total
            self.peak = MemoryByKind(**{**self._bytes, "activations": self._bytes["activations"] + operator_bytes})
        if self._on_operation is not None:
            *other_kinds, activations = self._bytes.values()
            self._on_operation(name, (*other_kinds, activations + operator_bytes))


def _new_storages(result: Any, known: Container[int], args: Any, kwargs: Any) -> list[UntypedStorage]:
    """Return the storages of an operation's results, without those of its inputs and those whose ids are `known`."""
    storages = {}
    for storage in map(Tensor.untyped_storage, _counted_tensors(result)):
        if id(storage) not in known:
            storages[id(storage)] = storage
    if storages:
        for tensor in _counted_tensors([args, kwargs]):
            storages.pop(id(tensor.untyped_storage()), None)
    return list(storages.values())


def _counted_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the dense tensors with memory in nested values."""
    return (t for t in tensor_leaves(value) if t.layout is torch.strided and t.device.type != "meta")
