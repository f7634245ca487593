"""Recording of a constructor's tensor operations on the meta device, and their replay for single tensors.

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

_DRAWING = ("random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_", "geometric_")
OVERWRITING = frozenset({"normal_", "uniform_", "zero_", "fill_", "copy_", *_DRAWING})


class Unrecordable(Exception):
    """The error for a constructor that cannot be recorded; its text gives the reason."""


@dataclass(frozen=True, kw_only=True)
class RecordedView:
    """The location of a recorded tensor: its storage, and its view of the storage."""

    memory: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor) -> "RecordedView":
        """Return the location of a strided tensor."""
        return RecordedView(
            memory=storage_key(tensor),
            dtype=tensor.dtype,
            size=tuple(tensor.shape),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
        )

    def on(self, memory: Tensor) -> Tensor:
        """Return the same view of real memory."""
        return torch.empty(0, dtype=self.dtype).set_(memory.untyped_storage(), self.offset, self.size, self.stride)

    def new(self) -> Tensor:
        """Allocate a tensor of this size, stride and dtype."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype)


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """An operation: its arguments, with `RecordedView` for recorded tensors, and the storages that it uses."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    draws: bool
    reads: frozenset[int]
    writes: frozenset[int]
    makes: tuple[RecordedView | None, ...] = ()
    overwrites: int | None = None

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
    _touched: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    _keys: dict[int, int] = field(default_factory=dict)
    _alive: list[Any] = field(default_factory=list)

    def hold(self, tensor: Tensor) -> None:
        """Keep a recorded tensor's meta storage alive, so that its key stays unique."""
        self._alive.append(tensor.untyped_storage())

    def knows(self, memory: int) -> bool:
        """Return True if a step has created or written the storage."""
        return memory in self._touched

    def add(self, step: RecordedStep) -> None:
        """Append an operation."""
        for memory in {*step.writes, *(view.memory for view in step.makes if view is not None)}:
            self._touched[memory].append(len(self.steps))
        self.steps.append(step)

    def name_draws(self, named: Sequence[tuple[str, RecordedView]]) -> None:
        """Assign a random stream to each draw, keyed by the first tensor that needs it and the index of the draw."""
        for name, view in named:
            draws = [number for number in self.needed(view) if self.steps[number].draws and number not in self._keys]
            for place, number in enumerate(draws):
                self._keys[number] = stream_key(self.seed, "init", name, place)

    def draws(self, view: RecordedView) -> bool:
        """Return whether the values of the view depend on a random draw."""
        return any(self.steps[number].draws for number in self.needed(view))

    def needed(self, *views: RecordedView) -> list[int]:
        """Return the steps that these values depend on, in order."""
        chosen: set[int] = set()
        seen: set[tuple[int, int]] = set()
        queue = [(view.memory, len(self.steps)) for view in views]
        while queue:
            memory, before = queue.pop()
            if (memory, before) in seen:
                continue
            seen.add((memory, before))
            for number in self._backwards(memory, before):
                if number not in chosen:
                    chosen.add(number)
                    step = self.steps[number]
                    queue += [(other, number) for other in step.reads | step.writes if other != memory]
        return sorted(chosen)

    def _backwards(self, memory: int, before: int) -> Iterator[int]:
        """Yield the writes that are not overwritten, last first, and the step that created the storage."""
        touched = self._touched.get(memory, [])
        for place in range(bisect_left(touched, before) - 1, -1, -1):
            yield touched[place]
            if self.steps[touched[place]].overwrites == memory:
                if place:
                    yield touched[0]
                return

    def values(self, *views: RecordedView) -> list[Tensor]:
        """Compute the values of only these tensors."""
        memories: dict[int, Tensor] = {}
        numbers = self.needed(*views)
        last = self._last_uses(numbers, kept={view.memory for view in views})
        with preserve_rng(), torch.no_grad():
            for number in numbers:
                self._run(number, memories)
                for memory in last.get(number, ()):
                    memories.pop(memory, None)
        return [view.on(self._found(view, memories)) for view in views]

    @staticmethod
    def _found(view: RecordedView, memories: dict[int, Tensor]) -> Tensor:
        if view.memory not in memories:
            raise Unrecordable("a tensor without memory that was made before the model")
        return memories[view.memory]

    def _last_uses(self, numbers: Sequence[int], *, kept: set[int]) -> dict[int, list[int]]:
        """Return, for each step, the storages that can be freed after it."""
        last: dict[int, int] = {}
        for number in numbers:
            step = self.steps[number]
            for memory in (*step.reads, *step.writes, *(view.memory for view in step.makes if view is not None)):
                last[memory] = number
        found: dict[int, list[int]] = defaultdict(list)
        for memory, number in last.items():
            if memory not in kept:
                found[number].append(memory)
        return found

    def _run(self, number: int, memories: dict[int, Tensor]) -> None:
        step = self.steps[number]
        if step.draws:
            seed_torch(self._keys.setdefault(number, stream_key(self.seed, "init", "#", number)))

        def real(value: Any) -> Any:
            if isinstance(value, RecordedView):
                return value.on(self._found(value, memories))
            return value.clone() if isinstance(value, Tensor) else value

        found = step.call(*map_arguments(step.args, real), **map_arguments(step.kwargs, real))
        for view, tensor in zip(step.makes, tensors_in(found), strict=True):
            if view is None:
                continue
            if tensor.stride() != view.stride or tensor.storage_offset() != view.offset:
                tensor = view.new().copy_(tensor)
            memories[view.memory] = tensor


def map_arguments(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Return the same nest of lists, tuples and dicts with `change` applied to every leaf."""
    if isinstance(tree, list | tuple):
        return type(tree)(map_arguments(value, change) for value in tree)
    if isinstance(tree, dict):
        return {name: map_arguments(value, change) for name, value in tree.items()}
    return change(tree)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors of a nest, in order."""
    found: list[Tensor] = []
    map_arguments(tree, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found
