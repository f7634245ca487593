"""Findings about the forward passes: modules in eval mode, and random numbers that are equal on the ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations

from paceline.console.formatting import first_names, plural
from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep

_TRAIN_HINT = "model.train() on all ranks after each evaluation"


def forward_findings(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield what is wrong with the modes of the models, and a note about equal random numbers."""
    unequal = next((found for step in run.steps for found in _unequal_modes(step)), None)
    if unequal is not None:
        yield unequal
    else:
        yield from _eval_mode(run)
    yield from _equal_random_numbers(run)


def _unequal_modes(step: ScriptStep) -> Iterator[ScriptFinding]:
    """Yield a finding if dropout or BatchNorm is switched off on one rank alone, or a note if nothing depends on it."""
    for first, second in combinations(range(len(step.ranks)), 2):
        one, other = _modes(step, first), _modes(step, second)
        for module in sorted(one.keys() & other.keys()):
            if one[module] == other[module]:
                continue
            rank, rest = (first, second) if one[module] > other[module] else (second, first)
            names = sorted(one[module].inactive ^ other[module].inactive)
            text = (
                f"rank {rank} trains with {plural(len(names), 'module')} in eval mode, as {first_names(names)}, and"
                f" rank {rest} does not"
                if names
                else f"{module} is in eval mode on rank {rank}, and not on rank {rest}; it has no dropout and no"
                " BatchNorm that depends on it"
            )
            yield ScriptFinding(
                name="modes-differ",
                text=text,
                step=step.number,
                line=next((call.line for call in step.calls(rank) if call.module == module), ""),
                hint=_TRAIN_HINT,
                is_note=not names,
            )
            return


@dataclass(frozen=True)
class _Mode:
    """The modules that are in eval mode at each call of a model, and whether the model itself is."""

    inactive: frozenset[str]
    is_eval: bool

    def __gt__(self, other: "_Mode") -> bool:
        return (len(self.inactive), self.is_eval) > (len(other.inactive), other.is_eval)


def _modes(step: ScriptStep, rank: int) -> dict[str, _Mode]:
    """Return the mode of each model of a rank; calls in eval mode are left out if others are in training mode."""
    modes: dict[str, _Mode] = {}
    for call in step.calls(rank):
        mode = modes.get(call.module)
        inactive = frozenset(call.inactive)
        modes[call.module] = _Mode(
            inactive=inactive if mode is None else inactive & mode.inactive,
            is_eval=not call.is_training and (mode is None or mode.is_eval),
        )
    return modes


def _eval_mode(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a note if the models are in eval mode until the end, although they have modules that depend on it."""
    since = None
    for step in run.steps:
        calls = [call for rank in range(run.world_size) for call in step.calls(rank)]
        if any(call.is_training for call in calls):
            since = None
        elif any(call.inactive for call in calls):
            since = since or step
    if since is None:
        return
    names = sorted({name for rank in range(run.world_size) for call in since.calls(rank) for name in call.inactive})
    yield ScriptFinding(
        name="eval-mode",
        text=f"the model is in eval mode while it trains: {plural(len(names), 'module')}, as {first_names(names)}, drop"
        " nothing, or use stored statistics",
        step=since.number,
        line=since.line("forward"),
        hint=f"{_TRAIN_HINT}; right for a fine-tuning without dropout, or with the statistics of another training",
        is_note=True,
    )


def _equal_random_numbers(run: ScriptRun) -> Iterator[ScriptFinding]:
    """Yield a note if two ranks begin their forwards with the same state of the random numbers, and draw from it."""
    if run.sharding == "tensor":
        return
    for first, second in combinations(range(run.world_size), 2):
        pairs = [(step, _first_state(step, first), _first_state(step, second)) for step in run.steps]
        judged = [(step, one == other) for step, one, other in pairs if one and other]
        equal = [step for step, is_equal in judged if is_equal]
        if len(equal) * 2 > len(judged):
            yield ScriptFinding(
                name="same-random-numbers",
                text=f"ranks {first} and {second} draw the same random numbers in the forward, at {len(equal)} of"
                f" {plural(len(judged), 'step')}: the same dropout masks for different samples",
                step=equal[0].number,
                line=equal[0].line("forward"),
                hint="torch.manual_seed(seed + rank) after the model is made; right where ranks must draw alike",
                is_note=True,
            )
            return


def _first_state(step: ScriptStep, rank: int) -> int:
    return next((call.random_state for call in step.ranks[rank].calls if call.random_state), 0)
