"""Numbers in module attributes that a training forward changes, kept equal to those of one process on every rank.

In one process a counter such as `self.calls += 1` counts all microbatches. A rank that runs only every second one would
count half of them, and all values that a forward derives from the counter would differ: a warm-up factor, a layer that
is frozen after some calls. If each microbatch adds the same integer to a number, its value before microbatch j is its
value before the step plus j times that integer. So each rank sets it before each forward. Every step checks this rule;
a step in which such a number is discovered, or breaks the rule, is rerun.

A rank can't compute other changes alone (a factor that decays, a cycle). The values then differ between ranks, which is
reported, unless forwards run sequentially and send the values from rank to rank.

`ModuleNumbers` finds the numbers and `ForwardNumbers` tracks them through the steps. `NumberTape` uses it for models
without norm statistics, `running_statistics` for models with them.
"""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.process_group import World
from paceline.parallel.module_access.attribute_fingerprints import attribute_fingerprints
from paceline.parallel.module_access.installed_hooks import Hook, new_handles, new_hooks, remove_hooks
from paceline.torch_internals.private_api import next_hook_number

_FIRST_STEPS = 2
_MOST_REPEATS = 3
_TORCHS = frozenset({"_is_full_backward_hook"})
_KINDS: tuple[type, ...] = (type(None), bool, int, float)
_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
_LARGEST = 2**53  # float64 can't represent all larger integers
MISSING = "missing"
WIDTH = 2

Number = None | bool | int | float | tuple[int, float]
"""The value of an attribute; a tensor without dimensions is its dtype's index and its value."""


class ModuleNumbers:
    """The attributes of `model`'s modules that are numbers, None, or tensors of one number in CPU memory.

    Attributes that a forward adds are included. An attribute's name is its module's FQN plus its attribute name.
    `snapshot` saves all values; `restore` restores them. If it unsets a flag or a hook handle, it also removes the
    hooks that the module has added since, because the forward installs them again. `ignored` returns the attributes of
    a module to ignore.
    """

    def __init__(self, model: nn.Module, *, but: Callable[[nn.Module], Container[str]] = lambda _: ()) -> None:
        self._modules = {f"{name}.".lstrip("."): vars(module) for name, module in model.named_modules()}
        self._ignored = {f"{name}.".lstrip("."): but(module) for name, module in model.named_modules()}
        self._sizes: list[int] = []
        self._places: dict[str, tuple[dict[str, Any], str]] = {}
        self._objects: dict[str, Any] = {}
        self._of_tensors: dict[str, Number | str] = {}
        self._model = model
        self._hook_number = 0
        self._contents: dict[str, frozenset[str]] = {}
        self._kept_contents = self._contents
        self.keep()

    def keep(self) -> None:
        """Save the current values."""
        self._find()
        self._objects = {name: attributes.get(key, MISSING) for name, (attributes, key) in self._places.items()}
        self._of_tensors = {n: _number(value) for n, value in self._objects.items() if type(value) is Tensor}
        self._hook_number, self._kept_contents = next_hook_number(), self._contents

    def put_back(self) -> None:
        """Restore the saved values, and remove attributes that were added since."""
        hooks = self._take_handles_back()
        for name in self.changed():
            if self._is_set_since(name):
                hooks += self._new_hooks_with(name)
            if name in self._of_tensors:  # other modules may hold the same tensor
                attributes, key = self._places[name]
                attributes[key] = self._objects[name]
            self.assign(name, self.kept(name))
        remove_hooks(hooks)

    def installs(self, name: str) -> bool:
        """Return whether a forward has set this flag since `snapshot`, and has installed hooks, buffers or objects.

        Such a flag must not be copied to a rank that has not installed them.
        """
        if not self._is_set_since(name):
            return False
        attributes, kept = self._modules[_module_of(name)], self._kept_contents[_module_of(name)]
        added = _contents(attributes) - kept
        has_object = any(_number(attributes.get(each, MISSING)) == MISSING for each in added)
        return has_object or bool(self._new_hooks_with(name))

    def changed(self) -> list[str]:
        """Return the names of the attributes that are new or have a different number than the saved one."""
        self._find()
        kept = self._objects
        others = [  # a number that is the same object has not changed
            name
            for name, (attributes, key) in self._places.items()
            if attributes.get(key, MISSING) is not kept.get(name, MISSING) or name in self._of_tensors
        ]
        return [name for name in others if self.value(name) != MISSING and not _same(self.kept(name), self.value(name))]

    def kept(self, name: str) -> Number | str:
        """Return the saved value of an attribute, `MISSING` if it did not exist."""
        return self._of_tensors[name] if name in self._of_tensors else _number(self._objects.get(name, MISSING))

    def value(self, name: str) -> Number | str:
        """Return the value of an attribute, `MISSING` if it does not exist or is not a number."""
        attributes, attribute = self._places[name] if name in self._places else self._place(name)
        return _number(attributes.get(attribute, MISSING))

    def assign(self, name: str, value: Number | str) -> None:
        """Set an attribute; `MISSING` removes it."""
        attributes, attribute = self._place(name)
        now = attributes.get(attribute)
        if value == MISSING:
            attributes.pop(attribute, None)
        elif isinstance(value, tuple) and type(now) is Tensor and now.dtype == _DTYPES[value[0]]:
            now.data.fill_(value[1])
        elif isinstance(value, tuple):
            attributes[attribute] = torch.tensor(value[1], dtype=_DTYPES[value[0]])
        else:
            attributes[attribute] = value

    def encode(self, names: Sequence[str]) -> list[float]:
        """Return `WIDTH` numbers for each attribute, exact in float64: its type and its value.

        The type is -1 for an attribute that is missing.
        """
        found: list[float] = []
        for value in map(self.value, names):
            if isinstance(value, tuple):
                found += [float(len(_KINDS) + value[0]), value[1]]
            elif isinstance(value, str):
                found += [-1.0, 0.0]
            else:
                kind = next(place for place, kind in enumerate(_KINDS) if isinstance(value, kind))
                found += [float(kind), float(value or 0)]
        return found

    def decode(self, names: Sequence[str], values: Sequence[float]) -> None:
        """Set the values that another rank's `encode` returned for the same names."""
        for index, name in enumerate(names):
            kind, value = int(values[index * WIDTH]), values[index * WIDTH + 1]
            if kind >= len(_KINDS):
                self.assign(name, (kind - len(_KINDS), value))
            elif kind >= 0:
                self.assign(name, None if kind == 0 else _KINDS[kind](value))

    def _find(self) -> None:
        """Find the attributes that are numbers; search again only if a module has more or fewer attributes."""
        sizes = [_size(attributes) for attributes in self._modules.values()]
        if sizes != self._sizes:
            self._sizes = sizes
            self._contents = {module: _contents(attributes) for module, attributes in self._modules.items()}
            found = {
                f"{module}{name}": (attributes, name)
                for module, attributes in self._modules.items()
                for name, value in attributes.items()
                if name not in _TORCHS and name not in self._ignored[module] and _number(value) != MISSING
            }
            self._places = {**self._places, **found}

    def _is_set_since(self, name: str) -> bool:
        """Return whether the attribute is a flag that was set since `snapshot`; `training` is no such flag."""
        is_mode = name.rpartition(".")[2] == "training"
        return not is_mode and self.value(name) is True and self.kept(name) in (MISSING, False)

    def _take_handles_back(self) -> list[Hook]:
        """Restore attributes that now hold the handle of a new hook instead of None, and return those hooks."""
        hooks, taken = new_hooks(self._model, since=self._hook_number), set[int]()
        for name, number in [*new_handles(self._modules, since=self._hook_number)] if hooks else []:
            if self.kept(name) in (MISSING, None):
                self.assign(name, self.kept(name))
                taken.add(number)
        return [(table, number) for table, number in hooks if number in taken]

    def _new_hooks_with(self, flag: str) -> list[Hook]:
        """Return the hooks that were registered on the attribute's module or its submodules since `snapshot`."""
        return new_hooks(self._model, since=self._hook_number, under=_module_of(flag))

    def _place(self, name: str) -> tuple[dict[str, Any], str]:
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
        self._others: list[str] = []
        self._num_micro = self._steps = self._repeats = 0
        self._ran: set[int | None] = set()
        self._current: int | None = None
        self._values: dict[tuple[str, int], Any] = {}
        self._found: dict[str, int | None] = {}
        self._broken: list[str] = []
        self._touched: set[str] = set()
        self._fingerprints: Mapping[str, Any] = {}
        self._changed: set[str] = set()
        self._told: set[str] = set()

    @property
    def carried(self) -> list[str]:
        """The names of the attributes that forwards change; the list is the same on every rank."""
        return [*self._increments, *self._others]

    @property
    def is_watched(self) -> bool:
        """Return whether this step's changes must be checked; the result is the same on all ranks."""
        if self._world.world_size == 1:
            return False
        return self._always or bool(self._increments) or self._is_early(self._steps + 1)

    def begin(self, *, num_micro: int, again: bool) -> None:
        """Start a step of `num_micro` microbatches over all ranks; if it is a rerun, restore the numbers first."""
        if again:
            self.numbers.put_back()
        else:
            self._repeats = 0
            self.numbers.keep()
        self._num_micro, self._current = num_micro if self._world.world_size > 1 else 0, None
        self._ran, self._values, self._touched, self._changed = set(), {}, set(), set()
        if self._num_micro and self._steps == _FIRST_STEPS - 1:
            self._fingerprints = attribute_fingerprints(self._model)

    def at(self, microbatch: int | None, *, sets: bool = True) -> None:
        """Set the numbers to those of one process before this microbatch; None for a stand-in that doesn't count.

        Without `sets` the numbers were received from the rank of the previous microbatch.
        """
        if not self._num_micro:
            return
        self._leave()
        self._ran.add(microbatch)
        self._current = microbatch
        if microbatch is not None and sets:
            for name in self._increments:
                self.numbers.assign(name, self._values.get((name, microbatch), self._expected(name, microbatch)))

    def is_settled(self, *, relayed: bool = False) -> bool:
        """Return whether this rank's forwards changed numbers as expected. `is_relayed`: other ranks sent them."""
        self._leave()
        names = self._increments if not relayed else ()
        self._broken = [
            name
            for name in names
            if any(value != self._expected(key, j + 1) for (key, j), value in self._values.items() if key == name)
        ]
        self._found = {}
        if self._num_micro:
            self._touched |= set(self.numbers.changed())
        if self._always or self._is_early(self._steps + 1):
            known = set(self.carried)
            new = sorted(name for name in self._touched - known if not self.numbers.installs(name))
            self._found = {name: self._increment(name) for name in new}
        return not (self._broken or self._found)

    def agree(self, *, relayed: bool = False) -> bool:
        """Agree with all ranks on how each new number changes; return False if the step must be rerun."""
        told = self._world.gather_json([len(self._ran), self._found, self._broken])
        seen = [found for runs, found, _ in told if runs]
        broken = sorted({name for *_, names in told for name in names})
        counts = False
        for name in sorted({name for found in seen for name in found}):
            increment, *rest = [found.get(name) for found in seen]
            is_first = self._always or self._steps < _FIRST_STEPS  # later, ranks may already have different counts
            if increment and is_first and all(other == increment for other in rest) and self._repeats < _MOST_REPEATS:
                self._increments[name] = increment
                counts = True
            else:
                self._others.append(name)
        for name in broken:
            del self._increments[name]
            self._others.append(name)
        self._repeats += 1
        return not (counts or broken or relayed)

    def end(self, *, relayed: bool = False) -> str:
        """Set the numbers to those after all microbatches; return a note about those that differ between ranks."""
        if not self._num_micro:
            return ""
        self._leave()
        self._steps += 1
        self._current = None
        own = [] if relayed else sorted((self._touched | set(self.numbers.changed())) - {*self._increments})
        if not relayed:
            for name in self._increments:
                self.numbers.assign(name, self._expected(name, self._num_micro))
        own += sorted(self._changed)
        if self._steps < _FIRST_STEPS:  # an attribute that only the first forward sets is harmless
            return ""
        own = [name for name in dict.fromkeys(own) if name not in self._silent and name not in self._told]
        self._told |= set(own)
        if not own:
            return ""
        return (
            f"the forward changes {', '.join(own[:3])}{' and others' if len(own) > 3 else ''}, and each rank has its "
            "own value: a later forward that depends on it differs from one process (a counter such as "
            "self.calls += 1 is kept equal; Job(on_update=...) runs once a step on every rank)"
        )

    @staticmethod
    def _is_early(step: int) -> bool:
        """Return True for the first steps, and then for the powers of two."""
        return step <= _FIRST_STEPS or step & (step - 1) == 0

    def _leave(self) -> None:
        """Record the numbers after a microbatch, to detect those that change back before the end of the step."""
        if self._current is not None:
            self._values |= {(name, self._current): self.numbers.value(name) for name in self._increments}
        if self._num_micro and self._ran and self._is_early(self._steps + 1):
            self._touched |= set(self.numbers.changed())
        if self._num_micro and self._ran and self._steps == _FIRST_STEPS - 1:
            now, before = attribute_fingerprints(self._model), self._fingerprints
            self._changed |= {name for name, value in now.items() if before.get(name) != value} - set(self.carried)

    def _expected(self, name: str, microbatch: int) -> Any:
        start = self.numbers.kept(name)
        if start != MISSING:
            return start + self._increments[name] * microbatch  # type: ignore[operator]
        return self._increments[name] * microbatch if microbatch else MISSING

    def _increment(self, name: str) -> int | None:
        """Return the integer that each forward of this rank may have added; None if it can't have."""
        start, now = self.numbers.kept(name), self.numbers.value(name)
        start = 0 if start == MISSING else start
        if type(start) is not int or type(now) is not int or not self._ran or (now - start) % len(self._ran):
            return None
        return (now - start) // len(self._ran)


class NumberTape:
    """The tape of a model without norm statistics, which sets and checks only numbers in module attributes.

    `over_batch`: the loss is over the full batch, so each rank runs one forward, and numbers are not tracked.
    """

    is_sequential = False

    def __init__(self, model: nn.Module, *, world: World, over_batch: bool = False) -> None:
        self._world, self._over_batch = world, over_batch
        self._numbers = ForwardNumbers(model, world=world, always=False)
        self._has_run = False
        self._notes: list[str] = []

    def begin_step(self, *, num_micro: int = 0) -> None:
        """Start a step of `num_micro` microbatches over all ranks; when repeating one, restore the numbers first."""
        self._numbers.begin(num_micro=0 if self._over_batch else num_micro, again=self._has_run)
        self._has_run = False

    def set_microbatch(self, microbatch: int, *, has_samples: bool = True) -> None:
        """Set the numbers for the next forward or backward; without samples it is a stand-in that doesn't count."""
        self._numbers.at(microbatch if has_samples else None)
        self._has_run = True

    def recording_context(self) -> AbstractContextManager[object]:
        """Return an empty context: no statistics are folded, so no read of them differs."""
        return nullcontext()

    def end_forward(self, microbatch: int) -> None:
        """Do nothing: no rank waits for this microbatch."""

    def fold(self, *, num_micro: int) -> bool:
        """Set the numbers to those after `num_micro` microbatches.

        Return False, on all ranks, if a forward changes a number in an unexpected way: the step must be rerun.
        """
        if self._numbers.is_watched and not self._are_settled():
            return False
        self._notes += filter(None, [self._numbers.end()])
        self._has_run = False
        return True

    def _are_settled(self) -> bool:
        unsettled = torch.tensor(int(not self._numbers.is_settled()), device=self._world.device)
        return not int(self._world.all_reduce(unsettled, op="max")) or self._numbers.agree()

    def undo(self) -> None:
        """Keep the numbers: a skipped step has run its forwards."""
        self._has_run = False

    def new_notes(self) -> list[str]:
        """Return the notes for the user that were not returned before."""
        notes, self._notes = self._notes, []
        return notes

    def close(self) -> None:
        """Do nothing: the model has no hooks of this tape."""


_REGISTRIES = ("_parameters", "_buffers", "_modules")


def _module_of(name: str) -> str:
    """Return the FQN of an attribute's module, with a dot; empty for the model itself."""
    return f"{name.rpartition('.')[0]}.".lstrip(".")


def _size(attributes: Mapping[str, Any]) -> int:
    return len(attributes) + sum(len(attributes.get(key, ())) for key in _REGISTRIES)


def _contents(attributes: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of a module's attributes, parameters, buffers and submodules."""
    return frozenset(attributes).union(*(attributes.get(key, ()) for key in _REGISTRIES))


def _number(value: Any) -> Number | str:
    if type(value) in _KINDS:  # a subclass, such as an IntEnum, is more than its number
        return value if not isinstance(value, int) or abs(value) <= _LARGEST else MISSING
    if isinstance(value, Tensor) and value.dim() == 0 and value.dtype in _DTYPES and type(value) is Tensor:
        is_plain = value.device.type == "cpu" and not value.requires_grad
        return (_DTYPES.index(value.dtype), float(value)) if is_plain else MISSING
    return MISSING


def _same(old: Number | str, new: Number | str) -> bool:
    return old is new or (type(old) is type(new) and (old == new or (old != old and new != new)))
