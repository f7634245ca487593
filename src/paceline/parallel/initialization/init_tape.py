"""Record a constructor's tensor operations on the meta device, and replay them for single tensors.

The tape tracks storages, not tensors: an operation creates some storages and writes to others. To find the operations
that a tensor depends on, the tape is searched backwards for writes to its storage, and to the storages that these
operations read; a write that overwrites the full storage ends the search. Each random operation has a separate random
stream, so an operation that is not replayed does not affect the others.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.torch_internals.private_api import storage_key
from paceline.torch_internals.rng import preserve_rng, seed_torch, stream_key

_RANDOM_OPERATIONS = ("random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_")
OVERWRITING_OPERATIONS = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", *_RANDOM_OPERATIONS})


class Unrecordable(Exception):
    """The error for a constructor that cannot be recorded; its text gives the reason."""


@dataclass(frozen=True, kw_only=True)
class RecordedView:
    """The location of a recorded tensor: its storage, and its view of the storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def from_tensor(tensor: Tensor) -> "RecordedView":
        """Return the location of a strided tensor."""
        return RecordedView(
            storage=storage_key(tensor),
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def view_of(self, storage_tensor: Tensor) -> Tensor:
        """Return the same view of real memory."""
        return torch.empty(0, dtype=self.dtype).set_(
            storage_tensor.untyped_storage(), self.offset, self.size, self.stride
        )

    def allocate(self) -> Tensor:
        """Allocate a tensor of this size, stride and dtype."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """An operation: its arguments, with `RecordedView` for recorded tensors, and the storages that it uses."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    is_random: bool
    read_storages: frozenset[int]
    written_storages: frozenset[int]
    created_views: tuple[RecordedView | None, ...] = ()
    overwritten_storage: int | None = None

    @property
    def name(self) -> str:
        """Return torch's name of the operation."""
        return str(getattr(self.call, "__name__", self.call)).partition(".")[0]


@dataclass
class InitTape:
    """The operations of one build."""

    seed: int
    steps: list[RecordedStep] = field(default_factory=list)
    constant_bytes: int = 0
    """Bytes of the real tensors that are arguments of the steps."""
    _steps_by_storage: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _stream_keys: dict[int, int] = field(default_factory=dict)
    _live_storages: list[Any] = field(default_factory=list)

    def keep_alive(self, tensor: Tensor) -> None:
        """Keep a recorded tensor's meta storage alive, so that its key stays unique."""
        self._live_storages.append(tensor.untyped_storage())

    def has_storage(self, storage: int) -> bool:
        """Return True if a step has created or written the storage."""
        return storage in self._steps_by_storage

    def append_step(self, step: RecordedStep) -> None:
        """Append an operation."""
        for storage in {*step.written_storages, *(view.storage for view in step.created_views if view is not None)}:
            self._steps_by_storage[storage].append(len(self.steps))
        self.steps.append(step)

    def assign_random_streams(self, named_views: Sequence[tuple[str, RecordedView]]) -> None:
        """Assign a random stream to each draw, keyed by the first tensor that needs it and the index of the draw."""
        for name, view in named_views:
            step_indices = [
                step_index
                for step_index in self.required_steps(view)
                if self.steps[step_index].is_random and step_index not in self._stream_keys
            ]
            for draw_index, step_index in enumerate(step_indices):
                self._stream_keys[step_index] = stream_key(self.seed, "init", name, draw_index)

    def depends_on_random(self, view: RecordedView) -> bool:
        """Return whether the values of the view depend on a random draw."""
        return any(self.steps[step_index].is_random for step_index in self.required_steps(view))

    def required_steps(self, *views: RecordedView) -> list[int]:
        """Return the steps that these values depend on, in order."""
        required: set[int] = set()
        visited: set[tuple[int, int]] = set()
        queue = [(view.storage, len(self.steps)) for view in views]
        while queue:
            storage, end = queue.pop()
            if (storage, end) in visited:
                continue
            visited.add((storage, end))
            for step_index in self._effective_writes(storage, end):
                if step_index not in required:
                    required.add(step_index)
                    step = self.steps[step_index]
                    queue += [
                        (other, step_index) for other in step.read_storages | step.written_storages if other != storage
                    ]
        return sorted(required)

    def _effective_writes(self, storage: int, end: int) -> Iterator[int]:
        """Yield the writes that are not overwritten, last first, and the step that created the storage."""
        step_indices = self._steps_by_storage.get(storage, [])
        for position in range(bisect_left(step_indices, end) - 1, -1, -1):
            yield step_indices[position]
            if self.steps[step_indices[position]].overwritten_storage == storage:
                if position:
                    yield step_indices[0]
                return

    def compute_values(self, *views: RecordedView) -> list[Tensor]:
        """Return the values of these tensors; only the steps that they depend on are replayed."""
        memory_by_storage: dict[int, Tensor] = {}
        step_indices = self.required_steps(*views)
        freed_after = self._storages_freed_after(step_indices, kept_storages={view.storage for view in views})
        with preserve_rng(), torch.no_grad():
            for step_index in step_indices:
                self._replay_step(step_index, memory_by_storage)
                for storage in freed_after.get(step_index, ()):
                    memory_by_storage.pop(storage, None)
        return [view.view_of(self._memory_of(view, memory_by_storage)) for view in views]

    @staticmethod
    def _memory_of(view: RecordedView, memory_by_storage: dict[int, Tensor]) -> Tensor:
        if view.storage not in memory_by_storage:
            raise Unrecordable("it uses a tensor on the meta device that was created before the model")
        return memory_by_storage[view.storage]

    def _storages_freed_after(self, step_indices: Sequence[int], *, kept_storages: set[int]) -> dict[int, list[int]]:
        """Return, for each step, the storages that can be freed after it."""
        last_use: dict[int, int] = {}
        for step_index in step_indices:
            step = self.steps[step_index]
            for storage in (
                *step.read_storages,
                *step.written_storages,
                *(view.storage for view in step.created_views if view is not None),
            ):
                last_use[storage] = step_index
        freed_after: dict[int, list[int]] = defaultdict(list)
        for storage, step_index in last_use.items():
            if storage not in kept_storages:
                freed_after[step_index].append(storage)
        return freed_after

    def _replay_step(self, step_index: int, memory_by_storage: dict[int, Tensor]) -> None:
        step = self.steps[step_index]
        if step.is_random:
            seed_torch(self._stream_keys.setdefault(step_index, stream_key(self.seed, "init", "#", step_index)))

        def to_real(value: Any) -> Any:
            if isinstance(value, RecordedView):
                return value.view_of(self._memory_of(value, memory_by_storage))
            return value.clone() if isinstance(value, Tensor) else value

        result = step.call(*map_arguments(step.args, to_real), **map_arguments(step.kwargs, to_real))
        for view, tensor in zip(step.created_views, find_tensors(result), strict=True):
            if view is None:
                continue
            if tensor.stride() != view.stride or tensor.storage_offset() != view.offset:
                tensor = view.allocate().copy_(tensor)
            memory_by_storage[view.storage] = tensor


def map_arguments(tree: Any, function: Callable[[Any], Any]) -> Any:
    """Return the same nested lists, tuples and dicts with `function` applied to every leaf."""
    if isinstance(tree, list | tuple):
        return type(tree)(map_arguments(value, function) for value in tree)
    if isinstance(tree, dict):
        return {name: map_arguments(value, function) for name, value in tree.items()}
    return function(tree)


def find_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts, in order."""
    tensors: list[Tensor] = []
    map_arguments(tree, lambda leaf: tensors.append(leaf) if isinstance(leaf, Tensor) else None)
    return tensors
