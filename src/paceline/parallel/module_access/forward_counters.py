"""Give the number attributes that a forward changes the same values on every rank as in one process.

In one process, a counter such as `self.calls += 1` counts all microbatches. A rank that runs every second microbatch
would count only half of them. A value that the forward computes from the counter, such as a warm-up factor, would then
differ from one process.

If every microbatch adds the same integer to a number, the number's value before microbatch j is its value before the
step plus j times that integer. Each rank therefore sets the number before each forward. Every step checks that the
number still follows this rule. If a new number is found, or a known number breaks the rule, the step is rerun.

A rank alone can't reproduce other changes, such as a factor that decays. The values then differ between ranks, and a
note says so. The exception is a model whose forwards run sequentially: its ranks send the values to each other.

`ForwardNumbers` tracks the numbers through the steps. `NumberRecorder` uses it for models without BatchNorm statistics,
and `running_statistics` for models with them.
"""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from paceline.comm.process_group import World
from paceline.parallel.module_access.attribute_fingerprints import attribute_fingerprints
from paceline.parallel.module_access.module_numbers import MISSING, ModuleNumbers

_FIRST_STEPS = 2
_MAX_RERUNS = 3


class ForwardNumbers:
    """The numbers that forwards of `model` change, tracked through the steps of the ranks of `world`.

    In each step, call `begin`, then `set_microbatch(j)` before each forward, then `changed_as_expected`. If the last
    returns False on any rank, call `agree_on_changes` on all ranks.

    `is_relayed` is a parameter of several methods. If it is True, forwards run sequentially, and each rank has received
    the numbers from the rank of the previous microbatch.

    `always`: search for new numbers in every step. Otherwise the search is done only in early steps, because a model
    has thousands of attributes.
    `reported_elsewhere`: names that the notes of this class don't mention.
    """

    def __init__(self, model: nn.Module, *, world: World, always: bool, reported_elsewhere: Iterable[str] = ()) -> None:
        self.numbers = ModuleNumbers(model)
        self._model = model
        self._world, self._always = world, always and world.world_size > 1
        self._reported_elsewhere = frozenset(reported_elsewhere)
        self._increments: dict[str, int] = {}
        self._untracked: list[str] = []  # names of numbers that a rank can't set
        self._num_micro = self._num_steps = self._num_reruns = 0
        self._microbatches: set[int | None] = set()  # those run in this step; None for stand-ins
        self._microbatch: int | None = None
        self._values: dict[tuple[str, int], Any] = {}  # (name, microbatch) -> the value after this microbatch
        self._new_increments: dict[str, int | None] = {}
        self._broken_names: list[str] = []
        self._changed_numbers: set[str] = set()
        self._fingerprints: Mapping[str, Any] = {}
        self._changed_objects: set[str] = set()  # attributes that are not numbers, by their fingerprints
        self._reported: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The names of the attributes that forwards change; the list is the same on every rank."""
        return [*self._increments, *self._untracked]

    @property
    def is_watched(self) -> bool:
        """Return whether `changed_as_expected` must be called in this step; the result is the same on all ranks."""
        if self._world.world_size == 1:
            return False
        return self._always or bool(self._increments) or self._is_early(self._num_steps + 1)

    def begin(self, *, num_micro: int, is_rerun: bool) -> None:
        """Start a step of `num_micro` microbatches over all ranks; if it is a rerun, restore the numbers first."""
        if is_rerun:
            self.numbers.restore()
        else:
            self._num_reruns = 0
            self.numbers.snapshot()
        self._num_micro, self._microbatch = num_micro if self._world.world_size > 1 else 0, None
        self._microbatches, self._values, self._changed_numbers, self._changed_objects = (
            set(),
            {},
            set(),
            set(),
        )
        if self._num_micro and self._num_steps == _FIRST_STEPS - 1:
            self._fingerprints = attribute_fingerprints(self._model)

    def set_microbatch(self, microbatch: int | None, *, sets_numbers: bool = True) -> None:
        """Set the numbers to the values that one process would have before this microbatch.

        `microbatch` is None for a stand-in batch, which doesn't count. Without `sets_numbers`, the numbers stay: they
        were received from the rank of the previous microbatch.
        """
        if not self._num_micro:
            return
        self._record_changes()
        self._microbatches.add(microbatch)
        self._microbatch = microbatch
        if microbatch is not None and sets_numbers:
            for name in self._increments:
                self.numbers.set_value(name, self._values.get((name, microbatch), self._expected(name, microbatch)))

    def changed_as_expected(self, *, is_relayed: bool = False) -> bool:
        """Return whether each known number changed by its integer and no new number was found.

        With `is_relayed`, known numbers are not checked.
        """
        self._record_changes()
        names = self._increments if not is_relayed else ()
        self._broken_names = [
            name
            for name in names
            if any(value != self._expected(key, j + 1) for (key, j), value in self._values.items() if key == name)
        ]
        self._new_increments = {}
        if self._num_micro:
            self._changed_numbers |= set(self.numbers.changed_names())
        if self._always or self._is_early(self._num_steps + 1):
            known = set(self.names)
            new_names = sorted(name for name in self._changed_numbers - known if not self.numbers.is_install_flag(name))
            self._new_increments = {name: self._infer_increment(name) for name in new_names}
        return not (self._broken_names or self._new_increments)

    def agree_on_changes(self, *, is_relayed: bool = False) -> bool:
        """Agree with all ranks on how each new number changes; return False if the step must be rerun."""
        gathered = self._world.gather_json([len(self._microbatches), self._new_increments, self._broken_names])
        increments_by_rank = [increments for num_microbatches, increments, _ in gathered if num_microbatches]
        broken_names = sorted({name for *_, names in gathered for name in names})
        has_new_counter = False
        is_early = self._always or self._num_steps < _FIRST_STEPS  # later, ranks may already have different counts
        can_add = is_early and self._num_reruns < _MAX_RERUNS
        for name in sorted({name for increments in increments_by_rank for name in increments}):
            increment, *others = [increments.get(name) for increments in increments_by_rank]
            if increment and can_add and all(other == increment for other in others):
                self._increments[name] = increment
                has_new_counter = True
            else:
                self._untracked.append(name)
        for name in broken_names:
            del self._increments[name]
            self._untracked.append(name)
        self._num_reruns += 1
        return not (has_new_counter or broken_names or is_relayed)

    def finish_step(self, *, is_relayed: bool = False) -> str:
        """Set the numbers to their values after all microbatches; return a note on numbers that ranks don't share."""
        if not self._num_micro:
            return ""
        self._record_changes()
        self._num_steps += 1
        self._microbatch = None
        names = (
            []
            if is_relayed
            else sorted((self._changed_numbers | set(self.numbers.changed_names())) - {*self._increments})
        )
        if not is_relayed:
            for name in self._increments:
                self.numbers.set_value(name, self._expected(name, self._num_micro))
        names += sorted(self._changed_objects)
        if self._num_steps < _FIRST_STEPS:  # an attribute that only the first forward sets is harmless
            return ""
        names = [name for name in dict.fromkeys(names) if name not in self._reported_elsewhere | self._reported]
        self._reported |= set(names)
        if not names:
            return ""
        return (
            f"the forward changes {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}, and each rank has "
            "its own value: a later forward that depends on it differs from one process (a counter such as self.calls "
            "+= 1 is kept equal; Job(on_update=...) runs once a step on every rank)"
        )

    @staticmethod
    def _is_early(step: int) -> bool:
        """Return whether the step is one of the first two, or its number is a power of two."""
        return step <= _FIRST_STEPS or step & (step - 1) == 0

    def _record_changes(self) -> None:
        """Record the numbers after a microbatch. A number may change and change back before the end of the step."""
        if self._microbatch is not None:
            self._values |= {(name, self._microbatch): self.numbers.current_value(name) for name in self._increments}
        if self._num_micro and self._microbatches and self._is_early(self._num_steps + 1):
            self._changed_numbers |= set(self.numbers.changed_names())
        if self._num_micro and self._microbatches and self._num_steps == _FIRST_STEPS - 1:
            now, before = attribute_fingerprints(self._model), self._fingerprints
            self._changed_objects |= {name for name, value in now.items() if before.get(name) != value} - set(
                self.names
            )

    def _expected(self, name: str, microbatch: int) -> Any:
        saved = self.numbers.saved_value(name)
        if saved != MISSING:
            return saved + self._increments[name] * microbatch  # type: ignore[operator]
        return self._increments[name] * microbatch if microbatch else MISSING

    def _infer_increment(self, name: str) -> int | None:
        """Return the integer that each forward of this rank has added; None if no integer gives the new value."""
        start, end = self.numbers.saved_value(name), self.numbers.current_value(name)
        start = 0 if start == MISSING else start
        if (
            type(start) is not int
            or type(end) is not int
            or not self._microbatches
            or (end - start) % len(self._microbatches)
        ):
            return None
        return (end - start) // len(self._microbatches)


class NumberRecorder:
    """The recorder of a model without BatchNorm statistics: it sets and checks only numbers in module attributes.

    `over_batch`: the loss is over the full batch, so each rank runs one forward, and numbers are not tracked.
    """

    is_sequential = False

    def __init__(self, model: nn.Module, *, world: World, over_batch: bool = False) -> None:
        self._world, self._over_batch = world, over_batch
        self._numbers = ForwardNumbers(model, world=world, always=False)
        self._has_run = False
        self._notes: list[str] = []

    def begin_step(self, *, num_micro: int = 0) -> None:
        """Start a step of `num_micro` microbatches over all ranks; in a rerun, restore the numbers first."""
        self._numbers.begin(num_micro=0 if self._over_batch else num_micro, is_rerun=self._has_run)
        self._has_run = False

    def set_microbatch(self, microbatch: int, *, has_samples: bool = True) -> None:
        """Set the numbers for the next forward or backward; without samples, it is a stand-in and doesn't count."""
        self._numbers.set_microbatch(microbatch if has_samples else None)
        self._has_run = True

    def recording_context(self) -> AbstractContextManager[object]:
        """Return an empty context: the model has no BatchNorm statistics to watch."""
        return nullcontext()

    def end_forward(self, microbatch: int) -> None:
        """Do nothing: no rank waits for this microbatch."""

    def fold(self, *, num_micro: int) -> bool:
        """Set the numbers to their values after `num_micro` microbatches.

        Return False, on all ranks, if a forward changes a number in an unexpected way; the step must then be rerun.
        """
        if self._numbers.is_watched and not self._changed_as_expected():
            return False
        self._notes += filter(None, [self._numbers.finish_step()])
        self._has_run = False
        return True

    def _changed_as_expected(self) -> bool:
        has_unexpected_changes = torch.tensor(int(not self._numbers.changed_as_expected()), device=self._world.device)
        return not int(self._world.all_reduce(has_unexpected_changes, op="max")) or self._numbers.agree_on_changes()

    def end_skipped_step(self) -> None:
        """End a step whose update was skipped. The numbers keep their new values, because the forwards have run."""
        self._has_run = False

    def new_notes(self) -> list[str]:
        """Return the notes for the user that were not returned before."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Do nothing: this recorder has no hooks."""
