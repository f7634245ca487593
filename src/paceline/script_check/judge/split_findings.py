"""Findings about a model that is split over ranks by hand: replicas that part, equal shards, unequal clip factors."""

from collections.abc import Iterator

import numpy as np

from paceline.console.formatting import first_names, plural
from paceline.script_check.judge.model_split import Key, ModelSplit, fit_group, read_same_samples
from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep
from paceline.script_check.judge.weight_findings import relative_distance

NOT_CLEAR = (
    "the ranks read the same samples, and all their random weights differ: pieces of a model that is split by hand, or"
    " weights that nobody seeded; verify-script compares it with one process"
)
NO_PIECES = (
    "the ranks have equal weights, read the same samples and compute other gradients, as where a script splits the"
    " sequences by hand; verify-script compares it with one process"
)
NOT_EXERCISED = (
    "whether the parts of the model together compute what the whole one does: verify-script compares them with one"
    " process"
)
_EQUAL = 1e-4  # relative distance of weights that count as equal
_SAME_FACTOR = 0.01  # relative, of factors that count as the same
_MAX_TIED = 2  # parameters that two stages have in common, such as a tied embedding


def split_findings(run: ScriptRun, split: ModelSplit) -> Iterator[ScriptFinding]:
    """Yield what is wrong with the gradients and the replicas of a model that is split by hand, and notes."""
    clipped = next((found for step in run.steps for found in _unequal_factors(step, split)), None)
    parted = _first_parted(run, split)
    if clipped is not None and (parted is None or clipped.step <= parted[0].number):
        yield clipped
    elif parted is not None:
        yield from _parted_replicas(run, split, *parted)
    yield from _peers_draw_otherwise(run, split)


def has_parted(run: ScriptRun, split: ModelSplit) -> bool:
    """Return whether a parameter with equal start values has other ones on some ranks after a step."""
    return _first_parted(run, split) is not None


def _unequal_factors(step: ScriptStep, split: ModelSplit) -> Iterator[ScriptFinding]:
    """Yield a finding if the ranks multiply the gradients of their parts by different factors, as by their own clip."""
    factors = {rank: factor for rank in range(len(step.ranks)) if (factor := _factor(step, split, rank)) is not None}
    if len(factors) < 2 or max(factors.values()) - min(factors.values()) <= _SAME_FACTOR * max(factors.values()):
        return
    shown = ", ".join(f"{value:.3g} on rank {rank}" for rank, value in list(factors.items())[:4])
    yield ScriptFinding(
        name="gradients-scaled-otherwise",
        text=f"the ranks multiply their gradients by different factors ({shown}): each one clips by the norm of its own"
        " parts of the model",
        step=step.number,
        line=step.line("step"),
        hint="add up the squared norms of the parts over their ranks, and of each replica once; then clip by the root",
    )


def _factor(step: ScriptStep, split: ModelSplit, rank: int) -> float | None:
    """Return the factor of all gradients of a rank's own parts; None if they have no common one."""
    values = []
    for optimizer, name in split.pieces | split.local:
        ranks = next((each for each in split.replicas[optimizer, name] if rank in each), ())
        if optimizer == step.optimizer and ranks:
            fitted = fit_group(step, name, ranks)
            if fitted.is_seen and fitted.factors and fitted.residual <= _SAME_FACTOR:
                values.append(fitted.factors[rank])
    if not values or np.ptp(values) > 2 * _SAME_FACTOR * abs(float(np.median(values))):
        return None
    return float(np.median(values))


def _first_parted(run: ScriptRun, split: ModelSplit) -> tuple[ScriptStep, list[Key]] | None:
    """Return the first step after which replicas differ, and which ones; constant ones prove nothing."""
    for step in run.steps:
        names = [
            key
            for key, groups in split.replicas.items()
            if key[0] == step.optimizer
            and key not in split.constant
            and any(_has_parted(step, key[1], ranks) for ranks in groups)
        ]
        if names:
            return step, sorted(names)
    return None


def _has_parted(step: ScriptStep, name: str, ranks: tuple[int, ...]) -> bool:
    prints = [step.weights[rank][name] for rank in ranks if name in step.weights[rank]]
    return any(relative_distance(prints[0], each) > _EQUAL for each in prints[1:])


def _parted_replicas(run: ScriptRun, split: ModelSplit, step: ScriptStep, keys: list[Key]) -> Iterator[ScriptFinding]:
    """Yield a finding about parameters that start equal on some ranks and get other values."""
    names = [name for _, name in keys]
    group = next(ranks for ranks in split.replicas[keys[0]] if _has_parted(step, names[0], ranks))
    is_own = any(fit_group(step, key[1], ranks).is_own for key in keys for ranks in split.replicas[key])
    why = "each rank steps with its own gradient alone" if is_own else "the ranks step with different gradients"
    which = f"ranks {', '.join(map(str, group))}"
    hint = "all_reduce the gradients of each replicated parameter over the ranks that have it, before the step"
    is_note = False
    if split.by_gradients:
        name, count = "equal-shards", len(split.replicas) - len(split.constant)
        text = (
            f"{len(names)} of {plural(count, 'parameter')}, as {first_names(names)}, start with equal values on"
            f" {which}, which compute different parts of the model with them, and {why}: the shards of all ranks were"
            " drawn with one seed"
        )
        hint = "draw the whole weight with one seed, and cut it; or seed each shard by its rank. If they are replicas: "
        hint += "all_reduce their gradients"
    elif split.local and not split.pieces:
        name = "shared-parameters-part"
        text = (
            f"{first_names(names)} has equal values on {which} before the first step, as the tied embedding of two"
            f" stages has, and other ones after it: {why}"
        )
        hint = "all_reduce (sum) the gradients of a tied parameter over its stages; right if they are different layers"
        is_note = len(names) > _MAX_TIED
    else:
        name = "replicas-part"
        text = (
            f"{len(names)} of {plural(len(split.replicas), 'parameter')}, as {first_names(names)}, are replicas on"
            f" {which}, and differ after the step: {why}"
        )
        if not read_same_samples(run) and split.pieces:
            hint += "; or give the ranks the same samples, if they compute parts of the same activations"
    yield ScriptFinding(
        name=name,
        text=text,
        step=step.number,
        parameter=names[0],
        line=step.line("backward") or step.line("step"),
        hint=hint,
        is_note=is_note,
    )


def _peers_draw_otherwise(run: ScriptRun, split: ModelSplit) -> Iterator[ScriptFinding]:
    """Yield a note if ranks with parts of one model read the same samples, and draw other random numbers."""
    for step in run.steps:
        states = [next((c.random_state for c in rank.calls if c.random_state), 0) for rank in step.ranks]
        for rank in range(1, len(states)):
            for other in range(rank):
                is_same = split.are_peers(other, rank) and step.samples(other) == step.samples(rank)
                if is_same and step.samples(rank) and states[other] and states[rank] != states[other]:
                    yield ScriptFinding(
                        name="peers-draw-otherwise",
                        text=f"ranks {other} and {rank} have parts of one model and the same samples, and draw"
                        " different random numbers in the forward: wrong for dropout on activations that both have",
                        step=step.number,
                        line=step.line("forward"),
                        hint="seed the random numbers of replicated activations alike on these ranks; right for dropout"
                        " on split activations. verify-script compares it with one process",
                        is_note=True,
                    )
                    return
