"""Keep numbers in module attributes, which a training forward changes, equal to those of one process on every rank.

In one process a counter such as `self.calls += 1` counts all microbatches. A rank that runs only every second one would
count half of them, and all values that a forward derives from the counter would differ: a warm-up factor, a layer that
is frozen after some calls. If each microbatch adds the same integer to a number, its value before microbatch j is its
value before the step plus j times that integer. So each rank sets it before each forward. Every step checks this rule;
a step in which such a number is discovered, or breaks the rule, is rerun.

A rank alone can't reproduce other changes (a factor that decays, a cycle). The values then differ between ranks, which
is reported, unless forwards run sequentially and send the values from rank to rank.

`ModuleNumbers` finds the numbers and `ForwardNumbers` tracks them through the steps. `NumberRecorder` uses both for
models without norm statistics, `running_statistics` for models with them.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.module_access.attribute_fingerprints import attribute_fingerprints
from paceline.parallel.module_access.installed_hooks import Hook, find_new_handles, find_new_hooks, remove_hooks
from paceline.torch_internals.private_api import next_hook_id

_FIRST_STEPS = 2
_MAX_RERUNS = 3
_TORCH_ATTRIBUTES = frozenset({"_is_full_backward_hook"})
_NUMBER_TYPES: tuple[type, ...] = (type(None), bool, int, float)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_MAX_INTEGER = 2**53  # float64 can't represent all larger integers
MISSING = "missing"
WIDTH = 2  # the numbers that encode one attribute: its type and its value

Number = None | bool | int | float | tuple[int, float]
"""The value of an attribute; a tensor without dimensions is its dtype's index and its value."""


class ModuleNumbers:
    """The attributes of `model`'s modules that are numbers, None, or tensors of one number in CPU memory.

    Attributes that a forward adds are included. An attribute's name is its module's FQN plus its attribute name.
    `snapshot` saves all values; `restore` restores them. If it unsets a flag or a hook handle, it also removes the
    hooks that the module has added since, because the forward installs them again. `ignored` returns the attributes of
    a module to ignore.
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
        self._contents: dict[str, frozenset[str]] = {}
        self._saved_contents = self._contents
        self.snapshot()

    def snapshot(self) -> None:
        """Save the current values."""
        self._find_numbers()
        self._saved_objects = {
            name: attributes.get(key, MISSING) for name, (attributes, key) in self._locations.items()
        }
        self._saved_tensor_values = {
            n: _as_number(value) for n, value in self._saved_objects.items() if type(value) is Tensor
        }
        self._hook_number, self._saved_contents = next_hook_id(), self._contents

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
        """Return whether a forward has set this flag since `snapshot`, and has installed hooks, buffers or objects.

        Such a flag must not be copied to a rank that has not installed them.
        """
        if not self._is_newly_set_flag(name):
            return False
        attributes, saved_contents = self._modules[_module_of(name)], self._saved_contents[_module_of(name)]
        added_names = _attribute_names(attributes) - saved_contents
        has_object = any(_as_number(attributes.get(added_name, MISSING)) == MISSING for added_name in added_names)
        return has_object or bool(self._new_hooks_of_module(name))

    def changed_names(self) -> list[str]:
        """Return the names of the attributes that are new or have a different number than the saved one."""
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
            and not _is_same_number(self.saved_value(name), self.current_value(name))
        ]

    def saved_value(self, name: str) -> Number | str:
        """Return the saved value of an attribute, `MISSING` if it did not exist."""
        return (
            self._saved_tensor_values[name]
            if name in self._saved_tensor_values
            else _as_number(self._saved_objects.get(name, MISSING))
        )

    def current_value(self, name: str) -> Number | str:
        """Return the value of an attribute, `MISSING` if it does not exist or is not a number."""
        attributes, attribute = self._locations[name] if name in self._locations else self._locate(name)
        return _as_number(attributes.get(attribute, MISSING))

    def set_value(self, name: str, value: Number | str) -> None:
        """Set an attribute; `MISSING` removes it."""
        attributes, attribute = self._locate(name)
        current = attributes.get(attribute)
        if value == MISSING:
            attributes.pop(attribute, None)
        elif isinstance(value, tuple) and type(current) is Tensor and current.dtype == _DTYPES[value[0]]:
            current.data.fill_(value[1])
        elif isinstance(value, tuple):
            attributes[attribute] = torch.tensor(value[1], dtype=_DTYPES[value[0]])
        else:
            attributes[attribute] = value

    def encode(self, names: Sequence[str]) -> list[float]:
        """Return `WIDTH` numbers for each attribute, exact in float64: its type (-1 if it is missing) and its value."""
        encoded: list[float] = []
        for value in map(self.current_value, names):
            if isinstance(value, tuple):
                encoded += [float(len(_NUMBER_TYPES) + value[0]), value[1]]
            elif isinstance(value, str):
                encoded += [-1.0, 0.0]
            else:
                type_index = next(index for index, kind in enumerate(_NUMBER_TYPES) if isinstance(value, kind))
                encoded += [float(type_index), float(value or 0)]
        return encoded

    def decode(self, names: Sequence[str], values: Sequence[float]) -> None:
        """Set the values that another rank's `encode` returned for the same names."""
        for index, name in enumerate(names):
            type_index, value = int(values[index * WIDTH]), values[index * WIDTH + 1]
            if type_index >= len(_NUMBER_TYPES):
                self.set_value(name, (type_index - len(_NUMBER_TYPES), value))
            elif type_index >= 0:
                self.set_value(name, None if type_index == 0 else _NUMBER_TYPES[type_index](value))

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
                if name not in _TORCH_ATTRIBUTES and name not in self._ignored[module] and _as_number(value) != MISSING
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

    Call `begin`, then `set_microbatch(j)` before each forward, then `changed_as_expected`. If it returns False on any
    rank, call `agree_on_changes` on all ranks.

    `always`: search for new numbers in every step; otherwise only in early steps, since a model has thousands.
    `reported_elsewhere`: names that the notes of this class don't mention.
    """

    def __init__(self, model: nn.Module, *, world: World, always: bool, reported_elsewhere: Iterable[str] = ()) -> None:
        self.numbers = ModuleNumbers(model)
        self._model = model
        self._world, self._always = world, always and world.world_size > 1
        self._silent = frozenset(reported_elsewhere)
        self._increments: dict[str, int] = {}
        self._untracked: list[str] = []
        self._num_micro = self._num_steps = self._num_reruns = 0
        self._microbatches: set[int | None] = set()
        self._microbatch: int | None = None
        self._values: dict[tuple[str, int], Any] = {}
        self._new_increments: dict[str, int | None] = {}
        self._broken_names: list[str] = []
        self._touched: set[str] = set()
        self._fingerprints: Mapping[str, Any] = {}
        self._changed_names: set[str] = set()
        self._reported: set[str] = set()

    @property
    def names(self) -> list[str]:
        """The names of the attributes that forwards change; the list is the same on every rank."""
        return [*self._increments, *self._untracked]

    @property
    def is_watched(self) -> bool:
        """Return whether this step's changes must be checked; the result is the same on all ranks."""
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
        self._microbatches, self._values, self._touched, self._changed_names = set(), {}, set(), set()
        if self._num_micro and self._num_steps == _FIRST_STEPS - 1:
            self._fingerprints = attribute_fingerprints(self._model)

    def set_microbatch(self, microbatch: int | None, *, sets_numbers: bool = True) -> None:
        """Set the numbers to those of one process before this microbatch; None: a stand-in batch, which doesn't count.

        Without `sets_numbers`, they were received from the rank of the previous microbatch.
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
        """Return whether the numbers changed as expected; with `is_relayed`, other ranks sent them: new ones only."""
        self._record_changes()
        names = self._increments if not is_relayed else ()
        self._broken_names = [
            name
            for name in names
            if any(value != self._expected(key, j + 1) for (key, j), value in self._values.items() if key == name)
        ]
        self._new_increments = {}
        if self._num_micro:
            self._touched |= set(self.numbers.changed_names())
        if self._always or self._is_early(self._num_steps + 1):
            known = set(self.names)
            new_names = sorted(name for name in self._touched - known if not self.numbers.is_install_flag(name))
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
        """Set the numbers to those after all microbatches; return a note about those that differ between ranks."""
        if not self._num_micro:
            return ""
        self._record_changes()
        self._num_steps += 1
        self._microbatch = None
        names = [] if is_relayed else sorted((self._touched | set(self.numbers.changed_names())) - {*self._increments})
        if not is_relayed:
            for name in self._increments:
                self.numbers.set_value(name, self._expected(name, self._num_micro))
        names += sorted(self._changed_names)
        if self._num_steps < _FIRST_STEPS:  # an attribute that only the first forward sets is harmless
            return ""
        names = [name for name in dict.fromkeys(names) if name not in self._silent and name not in self._reported]
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
        """Return True for the first steps, and then for the powers of two."""
        return step <= _FIRST_STEPS or step & (step - 1) == 0

    def _record_changes(self) -> None:
        """Record the numbers after a microbatch, to detect those that change back before the end of the step."""
        if self._microbatch is not None:
            self._values |= {(name, self._microbatch): self.numbers.current_value(name) for name in self._increments}
        if self._num_micro and self._microbatches and self._is_early(self._num_steps + 1):
            self._touched |= set(self.numbers.changed_names())
        if self._num_micro and self._microbatches and self._num_steps == _FIRST_STEPS - 1:
            now, before = attribute_fingerprints(self._model), self._fingerprints
            self._changed_names |= {name for name, value in now.items() if before.get(name) != value} - set(self.names)

    def _expected(self, name: str, microbatch: int) -> Any:
        saved = self.numbers.saved_value(name)
        if saved != MISSING:
            return saved + self._increments[name] * microbatch  # type: ignore[operator]
        return self._increments[name] * microbatch if microbatch else MISSING

    def _infer_increment(self, name: str) -> int | None:
        """Return the integer that each forward of this rank may have added; None if it can't have."""
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
    """The recorder of a model without norm statistics, which sets and checks only numbers in module attributes.

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
        """Set the numbers for the next forward or backward; without samples it is a stand-in that doesn't count."""
        self._numbers.set_microbatch(microbatch if has_samples else None)
        self._has_run = True

    def recording_context(self) -> AbstractContextManager[object]:
        """Return an empty context: the model has no norm statistics to watch."""
        return nullcontext()

    def end_forward(self, microbatch: int) -> None:
        """Do nothing: no rank waits for this microbatch."""

    def fold(self, *, num_micro: int) -> bool:
        """Set the numbers to those after `num_micro` microbatches.

        Return False, on all ranks, if a forward changes a number in an unexpected way: the step must be rerun.
        """
        if self._numbers.is_watched and not self._changed_as_expected():
            return False
        self._notes += filter(None, [self._numbers.finish_step()])
        self._has_run = False
        return True

    def _changed_as_expected(self) -> bool:
        has_unexpected_changes = torch.tensor(int(not self._numbers.changed_as_expected()), device=self._world.device)
        return not int(self._world.all_reduce(has_unexpected_changes, op="max")) or self._numbers.agree_on_changes()

    def undo(self) -> None:
        """Keep the numbers: a skipped step has run its forwards."""
        self._has_run = False

    def new_notes(self) -> list[str]:
        """Return the notes for the user that were not returned before."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Do nothing: this recorder has no hooks."""


_REGISTRIES = ("_parameters", "_buffers", "_modules")


def _module_of(name: str) -> str:
    """Return the FQN of an attribute's module, with a dot; empty for the model itself."""
    return f"{name.rpartition('.')[0]}.".lstrip(".")


def _count_attributes(attributes: Mapping[str, Any]) -> int:
    return len(attributes) + sum(len(attributes.get(key, ())) for key in _REGISTRIES)


def _attribute_names(attributes: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of a module's attributes, parameters, buffers and submodules."""
    return frozenset(attributes).union(*(attributes.get(key, ()) for key in _REGISTRIES))


def _as_number(value: Any) -> Number | str:
    if type(value) in _NUMBER_TYPES:  # a subclass, such as an IntEnum, is more than its number
        return value if not isinstance(value, int) or abs(value) <= _MAX_INTEGER else MISSING
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in _DTYPES and type(value) is Tensor:
        is_plain = value.device.type == "cpu" and not value.requires_grad
        return (_DTYPES.index(value.dtype), float(value)) if is_plain else MISSING
    return MISSING


def _is_same_number(old: Number | str, new: Number | str) -> bool:
    return old is new or (type(old) is type(new) and (old == new or (old != old and new != new)))
