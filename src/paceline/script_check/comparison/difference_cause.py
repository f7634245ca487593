"""The likely cause of a difference between the gradients of two runs that had the same samples."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.console.formatting import first_names, plural
from paceline.script_check.comparison.sample_comparison import has_sequence_pieces
from paceline.script_check.comparison.script_records import fingerprint_of, step_eps
from paceline.script_check.judge.reduction import find_reductions, fit_weights
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep, Vector
from paceline.script_check.recording import TensorPrint
from paceline.verification.fingerprints.ill_conditioned import factor_between
from paceline.verification.rung_result import RECORDING_FLOOR

_FACTOR = 1e-3  # relative, of factors that count as equal
_NEAR = 1e-2  # relative, of a factor that has a known reason
_MAX_COLUMNS = 16


@dataclass(frozen=True, kw_only=True)
class Cause:
    """The likely cause of a difference. `is_random`: random numbers differ, so the runs can't be compared."""

    text: str
    hint: str = ""
    is_random: bool = False


def gradient_cause(
    first: ScriptRun, second: ScriptRun, *, step: int, parameter: str, names: Mapping[str, str], called: tuple[str, str]
) -> Cause:
    """Return why the gradients of a step differ; `second` has at least as many ranks as `first`.

    `names` are the first run's names of the second run's parameters, and `called` are the names of the runs.
    """
    pair = _find_steps(first, second, step, parameter, names)
    if pair is None:
        return _unknown(called)
    reference = _Gradients(pair[0], {})
    other = _Gradients(pair[1], names)
    discarded = max(rank.num_discarded for rank in pair[1].ranks)
    if discarded and not any(rank.num_discarded for rank in pair[0].ranks):
        return Cause(
            text=f"{called[1]} throws away the gradients of {plural(discarded, 'backward pass')} in each step:"
            " zero_grad() is called within the accumulation",
            hint="call optimizer.zero_grad() once, after optimizer.step()",
        )
    return (
        _common_factor(reference, other, called, usual=_usual_passes(second))
        or _unequal_weights(reference, other, called)
        or _unequal_by_parameter(reference, other, called)
        or _known_noise(first, second)
        or _reached(reference, other, called)
        or (_other_forward((), called) if has_sequence_pieces(first, second) else _unknown(called))
    )


class _Gradients:
    """The gradients of a step by the names of the first run."""

    def __init__(self, step: ScriptStep, names: Mapping[str, str]) -> None:
        self.step = step
        self.own_names = {names.get(name, name): name for name in step.gradients[0]}
        self.prints: dict[str, TensorPrint] = {names.get(name, name): each for name, each in step.gradients[0].items()}
        reductions = find_reductions(step, before=None)
        self.factor = next((each.total.factor for each in reductions if each.total.kind == "scaled"), 1.0)

    def num_passes(self) -> int:
        return _num_passes(self.step)


def _find_steps(
    first: ScriptRun, second: ScriptRun, number: int, parameter: str, names: Mapping[str, str]
) -> tuple[ScriptStep, ScriptStep] | None:
    for step in second.steps:
        if step.number == number and parameter in {names.get(name, name) for name in step.gradients[0]}:
            for other in first.steps:
                if (other.number, other.optimizer) == (number, step.optimizer):
                    return other, step
    return None


def _num_passes(step: ScriptStep) -> int:
    return max((len(passes) for rank in step.ranks for passes in rank.own_gradients.values()), default=1)


def _usual_passes(run: ScriptRun) -> int:
    """Return the number of backward passes that most steps of a run have."""
    counts = Counter(_num_passes(step) for step in run.steps if step.has_prints)
    return counts.most_common(1)[0][0] if counts else 1


def _common_factor(reference: _Gradients, other: _Gradients, called: tuple[str, str], *, usual: int) -> Cause | None:
    """Return a cause if all gradients differ by one factor, which clipping is left out of.

    `usual` is the number of backward passes in most steps of the other run.
    """
    eps = max(step_eps(reference.step), step_eps(other.step))
    factors = [
        factor_between(fingerprint_of(other.prints[name], eps=eps), fingerprint_of(each, eps=eps))
        for name, each in reference.prints.items()
        if name in other.prints and each.norm
    ]
    known = [factor * reference.factor / other.factor for factor in factors if factor]
    if not known or len(known) < len(factors) or max(known) - min(known) > max(_FACTOR, 8 * eps) * abs(max(known)):
        return None
    factor, world, passes = known[0], len(other.step.ranks), other.num_passes()
    if abs(factor - 1) <= _FACTOR:
        return None
    if passes != usual and abs(factor / (passes / usual) - 1) < _NEAR:
        return Cause(
            text=f"this step of {called[1]} has {plural(passes, 'backward pass')}, and most have {usual}, by which the"
            f" loss is divided: its gradients are {factor:.4g} times those of {called[0]}",
            hint="divide the loss by the number of passes that the step really has, as at the end of an epoch",
        )
    reasons = [
        text
        for value, text in (
            (world, f"the {world} ranks: a sum in place of a mean, or a loss multiplied by them"),
            (1 / world, f"1/{world}: averaged twice, or a loss divided by the ranks"),
            (passes, f"the {passes} backward passes of a step: the loss is not divided by them"),
        )
        if value != 1 and abs(factor / value - 1) < _NEAR
    ]
    why = f", {'; or '.join(reasons)}" if reasons else ": a loss of another scale"
    return Cause(text=f"the gradients of {called[1]} are {factor:.4g} times those of {called[0]}{why}")


def _unequal_weights(reference: _Gradients, other: _Gradients, called: tuple[str, str]) -> Cause | None:
    """Return a cause if the first run weights the own gradients of the second one's ranks, or passes, unequally."""
    judged = set(other.step.judged_names)
    names = [name for name, own in other.own_names.items() if own in judged and name in reference.prints]
    for word, columns_of in (("ranks", other.step.own), ("backward passes", other.step.passes)):
        columns = {name: columns_of(other.own_names[name]) for name in names}
        if not columns or next(iter(columns.values())).shape[1] not in range(2, _MAX_COLUMNS + 1):
            continue
        weights, rest = _fit(reference, columns)
        mean = float(np.mean(weights))
        if rest < _NEAR and np.max(np.abs(weights - mean)) > _NEAR * abs(mean):
            shares = ", ".join(f"{value:.3g}" for value in weights / weights.sum())
            return Cause(
                text=f"the {word} of {called[1]} count as ({shares}) in {called[0]}, and equally in {called[1]}: a mean"
                " of means, each divided by its own count of tokens or samples",
                hint="divide the sum of the loss by the count of all ranks and passes",
            )
    return None


def _unequal_by_parameter(reference: _Gradients, other: _Gradients, called: tuple[str, str]) -> Cause | None:
    """Return a cause if the own gradients count unequally for some parameters, and otherwise for other ones.

    A model with several losses does so, each of which is a mean over its own count.
    """
    found: dict[str, list[tuple[float, str, str]]] = {}
    num_equal = 0
    for word, columns_of in (("ranks", other.step.own), ("backward passes", other.step.passes)):
        for name in (name for name, own in other.own_names.items() if own in other.step.judged_names):
            columns = columns_of(other.own_names[name])
            if name in reference.prints and columns.shape[1] in range(2, _MAX_COLUMNS // 2 + 1):
                weights, rest = _fit(reference, {name: columns})
                mean = float(np.mean(weights))
                is_equal = bool(np.max(np.abs(weights - mean)) <= _NEAR * abs(mean))
                num_equal += rest < _NEAR and is_equal
                if rest < _NEAR and not is_equal:
                    shares = ", ".join(f"{value:.3g}" for value in weights / weights.sum())
                    found.setdefault(word, []).append((rest, f"({shares})", name))
    word = max(found, key=lambda each: len(found[each]), default="")
    shown: dict[str, str] = {}
    for _, shares, name in sorted(found.get(word, [])):  # the best fits are of parameters that only one loss has
        shown.setdefault(shares, name)
    if len(shown) == 1 and not num_equal:
        shares, name = next(iter(shown.items()))
        return Cause(
            text=f"the {word} of {called[1]} count as {shares} for {name} in {called[0]}, and equally in {called[1]}: a"
            " mean of means, each divided by its own count of tokens or samples; the gradients of the others also come"
            " from other ranks",
            hint="divide the sum of the loss by the count of all ranks and passes",
        )
    if len(shown) < 2:
        return None
    counts = " and ".join(f"as {shares} for {name}" for shares, name in list(shown.items())[:2])
    return Cause(
        text=f"the {word} of {called[1]} count {counts} in {called[0]}, and equally in {called[1]}: a mean of means,"
        " for several losses, each divided by its own count of tokens or samples",
        hint="divide the sum of each loss by its count of all ranks and passes",
    )


def _fit(reference: _Gradients, columns: Mapping[str, Vector]) -> tuple[Vector, float]:
    sizes = {name: max(float(np.linalg.norm(each)), 1e-300) for name, each in columns.items()}
    target = np.concatenate([np.array(reference.prints[name].projections) / sizes[name] for name in columns])
    return fit_weights(target, np.vstack([each / sizes[name] for name, each in columns.items()]))


def random_cause(first: ScriptRun, second: ScriptRun, *, step: int, called: tuple[str, str]) -> Cause | None:
    """Return a cause if the ranks of the second run draw other random numbers than the process of the first one."""
    for one in (each for each in first.steps if each.number <= step):
        many = next(
            (each for each in second.steps if (each.optimizer, each.number) == (one.optimizer, one.number)), None
        )
        if many is None:
            continue
        own, of_ranks = _random_states(one, 0), [_random_states(many, rank) for rank in range(len(many.ranks))]
        others = [rank for rank, states in enumerate(of_ranks) if states and states != own]
        if not own and not others:
            continue
        if own == of_ranks[0] and others and many.samples(0) == many.samples(others[0]):
            return Cause(
                text=f"rank {others[0]} of {called[1]} draws other random numbers in its forward than rank 0 and"
                f" {called[0]}, for the same samples: dropout of an activation that several ranks have must be alike",
                hint="seed the random numbers of replicated activations alike on the ranks that share a model; or set"
                " dropout to 0, and record both again",
            )
        if others or own != of_ranks[0]:
            return _drawn()
    return None


def with_reached_parameters(
    differing: Sequence[str], equal: Sequence[str], padded: Sequence[str], called: tuple[str, str]
) -> Cause:
    """Return a cause from the parameters whose gradients differ, and those whose gradients are equal.

    `padded` are those with rows that the process of the first run lacks.
    """
    if equal:
        return Cause(
            text=f"the gradients of {first_names(differing)} differ, and those of {first_names(equal)} are equal: the"
            " forward between the latter and the loss is the same, and the backward to the others is not, or a term of"
            " the loss that reaches only them",
            hint="look for a collective without its backward, as dist.all_gather has none, or with the wrong group; a"
            " wrong recomputation; an auxiliary loss with another weight or count",
        )
    return _other_forward(padded, called)


def _other_forward(padded: Sequence[str], called: tuple[str, str]) -> Cause:
    rows = f", or {first_names(padded)} with rows of padding, which must not count in the loss" if padded else ""
    return Cause(
        text=f"all gradients differ, and by no common factor: the ranks of {called[1]} compute another forward or"
        f" another loss than {called[0]}: a loss over a part of the vocabulary or by local counts, other positions or"
        f" masks, a bias that each rank adds{rows}",
        hint="print the loss of both commands at the first step: if it differs, the forward or the loss does",
    )


def _reached(reference: "_Gradients", other: "_Gradients", called: tuple[str, str]) -> Cause | None:
    """Return a cause if only some gradients differ."""
    eps = max(step_eps(reference.step), step_eps(other.step))
    common = [name for name, each in reference.prints.items() if name in other.prints and each.norm]
    distances = {
        name: fingerprint_of(reference.prints[name], eps=eps).distance(fingerprint_of(other.prints[name], eps=eps))
        for name in common
    }
    equal = [name for name, each in distances.items() if each <= max(RECORDING_FLOOR, 16 * eps)]
    differing = [name for name in common if name not in equal]
    return with_reached_parameters(differing, equal, (), called) if equal and differing else None


def _random_states(step: ScriptStep, rank: int) -> list[int]:
    return [call.random_state for call in step.ranks[rank].calls if call.random_state]


def _drawn() -> Cause:
    return Cause(
        text="the model draws random numbers in its forward, as dropout does, and each process draws other ones",
        hint="set dropout to 0 by the script's own options, and record both again",
        is_random=True,
    )


def _known_noise(first: ScriptRun, second: ScriptRun) -> Cause | None:
    lines = [rank for run in (first, second) for step in run.steps for rank in step.ranks]
    if any(call.random_state for rank in lines for call in rank.calls):
        return _drawn()
    norms = sorted({name for rank in lines for name in rank.batch_norms})
    if norms:
        return Cause(
            text=f"batch norms, as {norms[0]}, use the statistics of their rank's own samples",
            hint="torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)",
        )
    return None


def _unknown(called: tuple[str, str]) -> Cause:
    return Cause(
        text=f"no weighting of the gradients that the ranks of {called[1]} computed gives those of {called[0]}: other"
        " targets, random augmentation, a loss over the whole batch, or counts of microbatches"
    )
