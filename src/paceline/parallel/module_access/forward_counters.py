"""Keep counters that a forward changes, such as `self.calls += 1`, equal on all ranks and to those of one process.

In one process, a counter such as `self.calls += 1` counts all microbatches. A rank that runs every second microbatch
would count only half of them. A value that the forward computes from the counter, such as a warm-up factor, would then
differ from one process.

If every microbatch adds the same integer to a number, the number's value before microbatch j is its value before the
step plus j times that integer. Each rank therefore sets the number before each forward. Every step checks that the
number still follows this rule. The step is rerun if a known number breaks the rule, or if a new number that follows the
rule is found.

A rank alone can't reproduce other changes, such as a factor that decays. The values then differ between ranks, and a
note says so. The exception is a model whose forwards run sequentially: its ranks send the values to each other.

`ForwardNumbers` tracks the numbers through the steps. It is used by `NumberRecorder` for models without BatchNorm
statistics, and by `running_statistics` for models with them.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from paceline.comm.process_group import World
from paceline.parallel.module_access.attribute_fingerprints import attribute_fingerprints
from paceline.parallel.module_access.installed_hooks import Hook, find_new_handles, find_new_hooks, remove_hooks
from paceline.parallel.module_access.number_values import (
    MISSING,
    Number,
    decode_numbers,
    encode_numbers,
    fill_tensor,
    is_same_number,
    new_tensor,
    to_number,
)

_FIRST_STEPS = 2
_MAX_RERUNS = 3
_TORCH_ATTRIBUTES = frozenset({"_is_full_backward_hook"})
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class ModuleNumbers:
    """The attributes of `model`'s modules that are numbers, None, or tensors of one number in CPU memory.

    Attributes that a forward adds are included. An attribute is named by its module's FQN and its own name.
    `ignored` returns the names of the attributes of a module that are left out.

    `snapshot` saves all values; `restore` restores them. Some forwards install hooks in their first call, and remember
    that in a flag (`self.is_ready = True`) or in the handle of a hook. If `restore` resets such an attribute, it also
    removes the hooks, because the next forward installs them again.
    """

    def __init__(self, model: nn.Module, *, ignored: Callable[[nn.Module], Container[str]] = lambda _: ()) -> None:
        self._modules = {f"{name}.".lstrip("."): vars(module) for name, module in model.named_modules()}
        self._ignored = {f"{name}.".lstrip("."): ignored(module) for name, module in model.named_modules()}
        self._attribute_counts: list[int] = []
        self._locations: dict[str, tuple[dict[str, Any], str]] = {}
        self._saved_objects: dict[str, Any] = {}
        self._saved_tensor_values: dict[str, Number | str] = {}
        self._model = model
        self._hook_number = 0
        self._contents: dict[str, frozenset[str]] = {}  # by module; see `_attribute_names`
        self._saved_contents = self._contents
        self.snapshot()

    def snapshot(self) -> None:
        """Save the current values."""
        self._find_numbers()
        self._saved_objects = {
            name: attributes.get(key, MISSING) for name, (attributes, key) in self._locations.items()
        }
        self._saved_tensor_values = {
            n: to_number(value) for n, value in self._saved_objects.items() if type(value) is Tensor
        }
        self._hook_number, self._saved_contents = RemovableHandle.next_id, self._contents

    def restore(self) -> None:
        """Restore the saved values, and remove attributes that were added since."""
        hooks = self._restore_handles()
        for name in self.changed_names():
            if self._is_newly_set_flag(name):
                hooks += self._new_hooks_of_module(name)
            if name in self._saved_tensor_values:  # other modules may hold the same tensor
                attributes, key = self._locations[name]
                attributes[key] = self._saved_objects[name]
            self.set_value(name, self.saved_value(name))
        remove_hooks(hooks)

    def is_install_flag(self, name: str) -> bool:
        """Return whether this attribute is a flag with which a forward remembers that it has installed something.

        That is: since `snapshot`, the flag became True, and the module got new hooks, buffers or objects. Such a flag
        must not be copied to a rank that has not installed these objects.
        """
        if not self._is_newly_set_flag(name):
            return False
        attributes, saved_contents = self._modules[_module_of(name)], self._saved_contents[_module_of(name)]
        added_names = _attribute_names(attributes) - saved_contents
        has_object = any(to_number(attributes.get(added_name, MISSING)) == MISSING for added_name in added_names)
        return has_object or bool(self._new_hooks_of_module(name))

    def changed_names(self) -> list[str]:
        """Return the names of the attributes that are new or whose number differs from the saved number."""
        self._find_numbers()
        saved_objects = self._saved_objects
        candidates = [  # a number that is the same object has not changed
            name
            for name, (attributes, key) in self._locations.items()
            if attributes.get(key, MISSING) is not saved_objects.get(name, MISSING) or name in self._saved_tensor_values
        ]
        return [
            name
            for name in candidates
            if self.current_value(name) != MISSING
            and not is_same_number(self.saved_value(name), self.current_value(name))
        ]

    def saved_value(self, name: str) -> Number | str:
        """Return the saved value of an attribute, `MISSING` if it did not exist."""
        return (
            self._saved_tensor_values[name]
            if name in self._saved_tensor_values
            else to_number(self._saved_objects.get(name, MISSING))
        )

    def current_value(self, name: str) -> Number | str:
        """Return the value of an attribute, `MISSING` if it does not exist or is not a number."""
        attributes, attribute = self._locations[name] if name in self._locations else self._locate(name)
        return to_number(attributes.get(attribute, MISSING))

    def set_value(self, name: str, value: Number | str) -> None:
        """Set an attribute; `MISSING` removes it."""
        attributes, attribute = self._locate(name)
        current = attributes.get(attribute)
        if value == MISSING:
            attributes.pop(attribute, None)
        elif isinstance(value, tuple):
            if not fill_tensor(current, value):
                attributes[attribute] = new_tensor(value)
        else:
            attributes[attribute] = value

    def encode(self, names: Sequence[str]) -> list[float]:
        """Return the values of these attributes as float64 numbers, for another rank."""
        return encode_numbers([self.current_value(name) for name in names])

    def decode(self, names: Sequence[str], encoded: Sequence[float]) -> None:
        """Set the values that another rank's `encode` returned for the same names, except missing ones."""
        for name, value in zip(names, decode_numbers(encoded), strict=True):
            if value != MISSING:
                self.set_value(name, value)

    def _find_numbers(self) -> None:
        """Find the attributes that are numbers; search again only if a module has more or fewer attributes."""
        sizes = [_count_attributes(attributes) for attributes in self._modules.values()]
        if sizes != self._attribute_counts:
            self._attribute_counts = sizes
            self._contents = {module: _attribute_names(attributes) for module, attributes in self._modules.items()}
            locations = {
                f"{module}{name}": (attributes, name)
                for module, attributes in self._modules.items()
                for name, value in attributes.items()
                if name not in _TORCH_ATTRIBUTES and name not in self._ignored[module] and to_number(value) != MISSING
            }
            self._locations = {**self._locations, **locations}

    def _is_newly_set_flag(self, name: str) -> bool:
        """Return whether the attribute is a flag that was set since `snapshot`; `training` is no such flag."""
        is_mode = name.rpartition(".")[2] == "training"
        return not is_mode and self.current_value(name) is True and self.saved_value(name) in (MISSING, False)

    def _restore_handles(self) -> list[Hook]:
        """Restore attributes that now hold the handle of a new hook instead of None, and return those hooks."""
        hooks, hook_numbers = find_new_hooks(self._model, since=self._hook_number), set[int]()
        for name, number in [*find_new_handles(self._modules, since=self._hook_number)] if hooks else []:
            if self.saved_value(name) in (MISSING, None):
                self.set_value(name, self.saved_value(name))
                hook_numbers.add(number)
        return [(table, number) for table, number in hooks if number in hook_numbers]

    def _new_hooks_of_module(self, flag: str) -> list[Hook]:
        """Return the hooks that were registered on the attribute's module or its submodules since `snapshot`."""
        return find_new_hooks(self._model, since=self._hook_number, prefix=_module_of(flag))

    def _locate(self, name: str) -> tuple[dict[str, Any], str]:
        module, _, attribute = name.rpartition(".")
        return self._modules[f"{module}.".lstrip(".")], attribute


class ForwardNumbers:
    """The numbers that forwards of `model` change, tracked through the steps of the ranks of `world`.

    In each step, call `begin`, then `set_microbatch(j)` before each forward, then `changed_as_expected`. If the last
    returns False on any rank, call `agree_on_changes` on all ranks.

    `is_relayed` is a parameter of several methods. If it is True, forwards run sequentially, and each rank has received
    the numbers from the rank of the previous microbatch.

    `always`: search for new numbers in every step. Otherwise the search is done only in the first two steps and in
    steps whose number is a power of two, because a model has thousands of attributes.
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
        self._values: dict[tuple[str, int], Any] = {}  # (name, microbatch) -> the value after its forward
        self._new_increments: dict[str, int | None] = {}
        self._broken_names: list[str] = []
        self._changed_numbers: set[str] = set()
        self._fingerprints: Mapping[str, Any] = {}
        self._changed_objects: set[str] = set()  # names of other attributes whose fingerprint has changed
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
        return self._always or bool(self._increments) or self._is_search_step(self._num_steps + 1)

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
        """Set the numbers for the next forward or backward of a microbatch to the values that one process would have.

        Before its forward, these are the values after the previous microbatch; before its backward, the values after
        its own forward, which this object has recorded. `microbatch` is None for a stand-in batch, which doesn't count.
        Without `sets_numbers`, the numbers stay: they were received from the rank of the previous microbatch.
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
        if self._always or self._is_search_step(self._num_steps + 1):
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
        have_equal_values = self._always or self._num_steps < _FIRST_STEPS  # later, ranks may have other values already
        can_add = have_equal_values and self._num_reruns < _MAX_RERUNS
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
            "its own value: a later forward that depends on it differs from one process. Only counters such as "
            "self.calls += 1 are kept equal; change other values in Job(on_update=...), once per step on every rank"
        )

    @staticmethod
    def _is_search_step(step: int) -> bool:
        """Return whether the step is one of the first two, or its number is a power of two."""
        return step <= _FIRST_STEPS or step & (step - 1) == 0

    def _record_changes(self) -> None:
        """Record the numbers after a microbatch. A number may change and change back before the end of the step."""
        if self._microbatch is not None:
            self._values |= {(name, self._microbatch): self.numbers.current_value(name) for name in self._increments}
        if self._num_micro and self._microbatches and self._is_search_step(self._num_steps + 1):
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
        """Set the numbers for the next forward or backward. A microbatch without samples is a stand-in: not counted."""
        self._numbers.set_microbatch(microbatch if has_samples else None)
        self._has_run = True

    def recording_context(self) -> AbstractContextManager[object]:
        """Return an empty context: the model has no BatchNorm statistics to watch."""
        return nullcontext()

    def end_forward(self, microbatch: int) -> None:
        """Do nothing: no rank waits for this microbatch."""

    def fold(self, *, num_micro: int) -> bool:
        """Set the numbers to their values after `num_micro` microbatches.

        Return False, on all ranks, if the step must be rerun: a known counter did not change by its integer in every
        forward, or a new counter was found.
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


def _module_of(name: str) -> str:
    """Return the FQN of an attribute's module, with a dot; empty for the model itself."""
    return f"{name.rpartition('.')[0]}.".lstrip(".")


def _count_attributes(attributes: Mapping[str, Any]) -> int:
    return len(attributes) + sum(len(attributes.get(key, ())) for key in _REGISTRIES)


def _attribute_names(attributes: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of a module's attributes, parameters, buffers and submodules."""
    return frozenset(attributes).union(*(attributes.get(key, ()) for key in _REGISTRIES))
