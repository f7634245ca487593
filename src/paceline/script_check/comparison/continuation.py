"""A run that continues another one from a checkpoint: its steps are compared with those after the checkpoint."""

from dataclasses import dataclass, replace

from msgspec.structs import replace as replace_fields

from paceline.script_check.comparison.sample_comparison import samples_of
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep

_MIN_REPLAYED = 2  # steps whose samples come again


@dataclass(frozen=True)
class Continuation:
    """The continuation of a run after its step `step`. `rest` is what that run made after this step, counted from 1."""

    step: int
    rest: ScriptRun


def find_continuation(before: ScriptRun, after: ScriptRun) -> Continuation | None:
    """Return how a run continues the run before; None if it does not begin with the weights after one of its steps."""
    start = {step.optimizer: _digests(step) for step in after.start}
    if not start or start == {step.optimizer: _digests(step) for step in before.start}:
        return None
    for number in sorted({step.number for step in before.steps}):
        reached = [step for step in before.steps if step.number == number and step.optimizer in start]
        if len(reached) == len(start) and all(_digests(step) == start[step.optimizer] for step in reached):
            later = tuple(_renumbered(step, number) for step in before.steps if step.number > number)
            first = tuple(_renumbered(step, number) for step in reached)
            return Continuation(number, replace(before, start=first, steps=later)) if later else None
    return None


def replayed_steps(before: ScriptRun, after: ScriptRun, *, last: int) -> tuple[int, int] | None:
    """Return the first and last one of the steps up to `last` whose samples the continued run reads again; or None."""
    found = [samples_of(step) for step in after.steps if step.optimizer == 0]
    earlier = [(step.number, samples_of(step)) for step in before.steps if step.optimizer == 0 and step.number <= last]
    for place, (number, samples) in enumerate(earlier):
        count = min(len(found), len(earlier) - place)
        pairs = zip(earlier[place:], found[:count], strict=False)
        if samples and count >= min(_MIN_REPLAYED, len(found)) and all(each[1] == again for each, again in pairs):
            return number, number + count - 1
    return None


def lacks_optimizer_state(rest: ScriptRun, after: ScriptRun) -> bool:
    """Return whether an optimizer that has a state at each step began without one in the continued run."""
    had_state = any(rank.made_before for step in after.start for rank in step.ranks)
    return not had_state and any(step.ranks[0].optimizer_class.startswith(_WITH_STEPS) for step in rest.steps)


_WITH_STEPS = ("Adam", "NAdam", "RAdam", "Adagrad", "Adamax", "ASGD", "RMSprop", "Rprop")
"""Optimizers of torch whose state counts the steps."""


def _digests(step: ScriptStep) -> dict[str, int]:
    return {name: each.digest for name, each in step.weights[0].items()}


def _renumbered(step: ScriptStep, by: int) -> ScriptStep:
    lines = [replace_fields(line, step=line.step - by) for line in step.ranks]
    return ScriptStep(tuple(line if line.step else replace_fields(line, gradients={}) for line in lines))
