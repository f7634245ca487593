"""Memory of a rank in bytes: parameters, gradients, optimizer state, buffers, and everything else during a step."""

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

from paceline.torch_internals.dispatch_modes import DispatchMode, name_of, storage_resizes
from paceline.torch_internals.private_api import in_backward
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
        return sum(getattr(self, each.name) for each in fields(self))

    def as_json(self) -> dict[str, int]:
        """Return the bytes by kind, and `total`."""
        return {**asdict(self), "total": self.total}


def memory_at_rest(
    *, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer] = (), shares: Sequence[Tensor] = ()
) -> MemoryByKind:
    """Return this rank's bytes between two steps, without padding; shared memory counts once.

    `updated_tensors` are the tensors that the optimizers update, if they are not the model's own parameters but rows
    of them.
    """
    parameters = list(model.parameters())
    return MemoryByKind(
        parameters=elements(parameters),
        gradients=elements([p.grad for p in [*parameters, *shares] if p.grad is not None]),
        optimizer=elements(list(optimizer_tensors(optimizers))),
        buffers=elements(list(model.buffers())),
    )


def elements(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of the tensors' elements on this rank; an expanded tensor counts its memory once."""
    found: dict[int, tuple[int, dict[tuple[int, torch.Size], int]]] = {}
    for each in map(local_tensor, tensors):
        if each.is_meta:  # the memory is on another rank
            continue
        storage = each.untyped_storage()
        _, views = found.setdefault(id(storage), (storage.nbytes(), {}))
        views[(int(each.storage_offset()), each.shape)] = each.numel() * each.element_size()
    return sum(min(size, sum(views.values())) for size, views in found.values())


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a distributed tensor, or the tensor itself."""
    if not hasattr(tensor, "to_local"):
        return tensor
    with torch.no_grad():
        part: Tensor = tensor.to_local()
    return part


def optimizer_tensors(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[Tensor]:
    """Yield the tensors of the optimizers' states."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from _within(state)


@dataclass
class _Live:
    num_bytes: int
    kind: str
    gone: "weakref.ref[UntypedStorage]"


class StorageTracker:
    """A tracker of the storages that operations have created, for as long as they live."""

    def __init__(self) -> None:
        self._storages: dict[int, weakref.ref[UntypedStorage]] = {}
        self._is_told = False

    def see(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Record the storages that an operation created; a view of an input has no new storage."""
        if self._is_told:
            return
        for storage in _new(result, self._storages, args, kwargs):
            place = id(storage)
            self._storages[place] = weakref.ref(storage, partial(self._forget, place))

    def _forget(self, place: int, _: object) -> None:
        self._storages.pop(place, None)

    def storages(self) -> list[UntypedStorage]:
        """Return the storages that are alive, and stop tracking."""
        self._is_told = True
        found = [known() for known in list(self._storages.values())]
        return [storage for storage in found if storage is not None]


class MemoryTracker(DispatchMode):
    """A tracker of this rank's peak memory and its composition, for one kind of device.

    Every result of an operation is tracked until its memory is freed; storages that `fully_shard` resizes are tracked
    too. Use it around a step that is not the first: the optimizer's state must exist. `updated_tensors` is as in
    `memory_at_rest`; copies among them count as optimizer state. `other_storages` count as activations.

    `operator_bytes` returns the peak bytes of an operation while it runs, including its results; `extra_bytes` returns
    the bytes that exist in addition. `on_operation` gets each operation's name and the bytes of each kind at this time;
    `on_phase_change` is called when a backward begins or ends.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer] = (),
        shares: Sequence[Tensor] = (),
        others: Iterable[UntypedStorage] = (),
        device: str = "cpu",
        moment: Callable[[Any, Any], int] | None = None,
        beside: Callable[[], int] | None = None,
        note: Callable[[str, tuple[int, ...]], None] | None = None,
        turn: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device, self._moment, self._beside = device, moment, beside
        self._note, self._turn = note, turn
        self._parameters = list({id(p): p for p in (*model.parameters(), *shares)}.values())
        self._bytes = dict.fromkeys(KINDS, 0)
        self._live: dict[int, _Live] = {}
        self._without_gradient = [p for p in self._parameters if p.requires_grad]
        self._was_backward = False
        self._exits = ExitStack()
        self._most = 0
        self.peak = MemoryByKind()
        """The bytes of each kind when their sum was highest."""
        self.kept_bytes = 0
        """The activations when backward began; the maximum over the microbatches."""
        for kind, tensors in self._known(model, optimizers, shares):
            for tensor in tensors:
                self._follow(local_tensor(tensor).untyped_storage(), kind)
        for storage in others:
            self._follow(storage, "activations")

    def __enter__(self) -> "MemoryTracker":
        self._exits.enter_context(storage_resizes(self._resized))
        self._compare("begun")
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *reason: Any) -> None:
        super().__exit__(*reason)  # type: ignore[no-untyped-call]
        self._exits.close()
        self._live.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Track the results, and run the operation."""
        if any(hasattr(kind, "to_local") for kind in types):
            return NotImplemented
        backward = in_backward()
        if backward and not self._was_backward:
            self.kept_bytes = max(self.kept_bytes, self._bytes["activations"])
        if self._was_backward and not backward:
            self._gradients()
            self._without_gradient = [p for p in self._parameters if p.requires_grad]
        if backward != self._was_backward and self._turn is not None:
            self._turn()
        self._was_backward = backward
        name = name_of(func)
        if self._moment is not None:
            self._compare(name, self._moment(func, args))
        result = func(*args, **(kwargs or {}))
        for storage in _new(result, self._live, args, kwargs):
            self._follow(storage, "activations")
        self._compare(name, has_gradients=self._moment is None)  # a running operation creates no gradients
        return result

    def _known(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], shares: Sequence[Tensor]
    ) -> Iterator[tuple[str, list[Tensor]]]:
        yield "parameters", list(model.parameters())
        yield "gradients", [p.grad for p in self._parameters if p.grad is not None]
        yield "optimizer", [*optimizer_tensors(optimizers), *shares]
        yield "buffers", list(model.buffers())

    def _follow(self, storage: UntypedStorage, kind: str) -> None:
        place = id(storage)
        if place in self._live or storage.device.type != self._device:
            return
        gone = weakref.ref(storage, lambda _: self._forget(place))
        self._live[place] = _Live(storage.nbytes(), kind, gone)
        self._bytes[kind] += storage.nbytes()

    def _forget(self, place: int) -> None:
        live = self._live.pop(place, None)
        if live is not None:
            self._bytes[live.kind] -= live.num_bytes

    def _resized(self, storage: UntypedStorage) -> None:
        live = self._live.get(id(storage))
        if live is None:
            self._follow(storage, "activations")
        else:
            self._bytes[live.kind] += storage.nbytes() - live.num_bytes
            live.num_bytes = storage.nbytes()
        self._compare("resized")

    def _gradients(self) -> None:
        """Reclassify activations that have become gradients."""
        if all(map(is_, map(_GRADIENT, self._without_gradient), repeat(None))):  # as after most operations
            return
        left = [parameter for parameter in self._without_gradient if parameter.grad is None]
        for gradient in (parameter.grad for parameter in self._without_gradient):
            if gradient is None:
                continue
            live = self._live.get(id(local_tensor(gradient).untyped_storage()))
            if live is not None and live.kind == "activations":
                self._bytes["activations"] -= live.num_bytes
                self._bytes["gradients"] += live.num_bytes
                live.kind = "gradients"
        self._without_gradient = left

    def _compare(self, name: str, moment_bytes: int = 0, *, has_gradients: bool = True) -> None:
        moment_bytes += 0 if self._beside is None else self._beside()
        there = sum(self._bytes.values()) + moment_bytes
        is_most = there > self._most
        if has_gradients and self._was_backward and (is_most or self._note is not None):
            self._gradients()
        if is_most:
            self._most = there
            self.peak = MemoryByKind(**{**self._bytes, "activations": self._bytes["activations"] + moment_bytes})
        if self._note is not None:
            *others, activations = self._bytes.values()
            self._note(name, (*others, activations + moment_bytes))


def _new(result: Any, known: Container[int], args: Any, kwargs: Any) -> list[UntypedStorage]:
    """Return the storages of an operation's results that are neither known nor its inputs."""
    new = {}
    for storage in map(Tensor.untyped_storage, _within(result)):
        if id(storage) not in known:
            new[id(storage)] = storage
    if new:
        for tensor in _within([args, kwargs]):
            new.pop(id(tensor.untyped_storage()), None)
    return list(new.values())


def _within(value: Any) -> Iterator[Tensor]:
    """Yield the dense tensors with memory in nested values."""
    return (t for t in tensor_leaves(value) if t.layout is torch.strided and t.device.type != "meta")
