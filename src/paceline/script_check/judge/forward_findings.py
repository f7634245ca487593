"""Findings about the forward passes: modules in eval mode, and random numbers that are equal on the ranks."""

from collections.abc import Iterator
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
        for module in one.keys() & other.keys():
            if one[module] == other[module]:
                continue
            inactive = [{name for _, names in modes[module] for name in names} for modes in (one, other)]
            rank = first if len(inactive[0]) > len(inactive[1]) else second
            has_effect = inactive[0] != inactive[1]
            names = sorted(inactive[0] ^ inactive[1])
            text = (
                f"rank {rank} trains with {plural(len(names), 'module')} in eval mode, as {first_names(names)}, and"
                f" rank {second if rank == first else first} does not"
                if has_effect
                else f"{module} is in eval mode on one of ranks {first} and {second} alone; it has no dropout and no"
                " BatchNorm that depends on it"
            )
            yield ScriptFinding(
                name="modes-differ",
                text=text,
                step=step.number,
                line=next((call.line for call in step.calls(rank) if call.module == module), ""),
                hint=_TRAIN_HINT,
                is_note=not has_effect,
            )
            return


def _modes(step: ScriptStep, rank: int) -> dict[str, set[tuple[bool, tuple[str, ...]]]]:
    modes: dict[str, set[tuple[bool, tuple[str, ...]]]] = {}
    for call in step.calls(rank):
        modes.setdefault(call.module, set()).add((call.is_training, call.inactive))
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
