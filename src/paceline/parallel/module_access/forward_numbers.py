"""Numbers in module attributes that a training forward changes, with the values of one process on every rank.

In one process a count such as `self.calls += 1` goes through all microbatches in order. A rank that runs every second
one would count half of them, and whatever a forward derives from the count would differ: a warm-up factor, a layer that
is frozen after so many calls. If each microbatch adds the same integer to a number, its value before microbatch j is
that before the step plus j times the integer, so each rank sets it before each forward. Every step checks that this
held; the step in which it is found, or no longer holds, is repeated.

No rank can compute other changes alone (a factor that decays, a cycle). They are each rank's own, and are reported,
unless forwards run one after another and pass them on.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from paceline.comm.process_group import World
from paceline.parallel.module_access.attribute_fingerprints import attribute_fingerprints
from paceline.parallel.module_access.module_numbers import MISSING, ModuleNumbers

_FIRST_STEPS = 2
_MOST_REPEATS = 3


class ForwardNumbers:
    """The numbers that forwards of `model` change, followed through the steps of the ranks of `world`.

    Call `begin`, then `at(j)` before each forward, then `is_settled`; if any rank's returned False, `agree` on all.

    `always`: look for new ones in every step; otherwise only in early steps, since the model has thousands of numbers.
    `reported_elsewhere`: names that no note of this class mentions.
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
        """The names of the attributes that forwards change, the same list on every rank."""
        return [*self._increments, *self._others]

    @property
    def is_watched(self) -> bool:
        """Return whether this step's changes must be checked, on all ranks alike."""
        if self._world.world_size == 1:
            return False
        return self._always or bool(self._increments) or self._is_early(self._steps + 1)

    def begin(self, *, num_micro: int, again: bool) -> None:
        """Start a step of `num_micro` microbatches over all ranks; when it is repeated, restore the numbers first."""
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
        """Set the counts that one process has in this microbatch; None for a stand-in that doesn't count.

        Without `sets` the numbers come from the rank of the previous microbatch.
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
        """Return whether this rank's forwards changed numbers only as expected. `relayed`: ranks passed them on."""
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
            self._found = {name: self._increment(name) for name in sorted(self._touched) if name not in known}
        return not (self._broken or self._found)

    def agree(self, *, relayed: bool = False) -> bool:
        """Agree on all ranks about the numbers that `is_settled` found; return False if the step must be repeated."""
        told = self._world.gather_json([len(self._ran), self._found, self._broken])
        seen = [found for runs, found, _ in told if runs]
        broken = sorted({name for *_, names in told for name in names})
        counts = False
        for name in sorted({name for found in seen for name in found}):
            increment, *rest = [found.get(name) for found in seen]
            is_first = self._always or self._steps < _FIRST_STEPS  # else ranks may have counted by themselves before
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
        """Set the numbers to those after all microbatches; return a note about those that are each rank's own."""
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
        if self._steps < _FIRST_STEPS:  # what a first forward sets for good does no harm
            return ""
        own = [name for name in dict.fromkeys(own) if name not in self._silent and name not in self._told]
        self._told |= set(own)
        if not own:
            return ""
        return (
            f"the forward changes {', '.join(own[:3])}{' and others' if len(own) > 3 else ''}, and each rank has its "
            "own value: a later forward that depends on it is not one process's (a count, self.calls += 1, is "
            "followed; Job(on_update=...) runs once a step on every rank)"
        )

    @staticmethod
    def _is_early(step: int) -> bool:
        """Return True for the first steps, and then ever less often."""
        return step <= _FIRST_STEPS or step & (step - 1) == 0

    def _leave(self) -> None:
        """Note the numbers after a microbatch; one that returns to its value by the end of the step is seen too."""
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
        """Return what each forward of this rank may have added to an integer."""
        start, now = self.numbers.kept(name), self.numbers.value(name)
        start = 0 if start == MISSING else start
        if type(start) is not int or type(now) is not int or not self._ran or (now - start) % len(self._ran):
            return None
        return (now - start) // len(self._ran)
