"""Find where two recordings diverge: the first step, the worst parameter, and the kind of difference."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.console.formatting import plural
from paceline.errors import UsageError
from paceline.verification.fingerprints.fingerprint import FLOAT32_EPS, Fingerprint, Record
from paceline.verification.fingerprints.ill_conditioned import (
    PROPORTIONAL_TOLERANCE,
    IllConditionedCheck,
    factor_between,
    has_factor,
)
from paceline.verification.rung_result import RECORDING_FLOOR

_MAX_NAMES = 3
_EQUAL_WEIGHTS_DISTANCE = 8 * FLOAT32_EPS  # equal gradients and equal optimizers leave weights closer than this
_FACTOR_TOLERANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The verdict on two recordings; `first` is None if they differ by rounding at most.

    `steps` is the number of steps in both recordings, and `recorded` the number in each. `unjudged`: parameters whose
    gradient is only rounding, so that a difference proves nothing.
    """

    verdict: str
    steps: int
    text: str
    first: dict[str, Any] | None = None
    unjudged: tuple[str, ...] = ()
    recorded: tuple[int, int] = (0, 0)
    max_distance: float = 0.0
    """The largest relative distance of two tensors, if none differs by more than rounding."""


def compare_recordings(
    first_records: Sequence[Record], second_records: Sequence[Record], *, same_ranks: bool = True
) -> Comparison:
    """Compare two recordings step by step: the gradients of a step, then the weights after its update.

    Step 0 has the initial weights. If `same_ranks` is false, the runs had different numbers of ranks, so the batches of
    a rank differ by design and are not compared.

    Raises:
        UsageError: the initial weights are equal or missing, and no later step is in both recordings.
    """
    by_step = {(record.step, record.optimizer): record for record in second_records}
    pairs = [(r, by_step[r.step, r.optimizer]) for r in first_records if (r.step, r.optimizer) in by_step]
    if not same_ranks:
        pairs = [(replace(first, batch=None), replace(second, batch=None)) for first, second in pairs]
    steps, recorded = _num_steps([first for first, _ in pairs]), (_num_steps(first_records), _num_steps(second_records))
    worst = 0.0
    check = IllConditionedCheck(pairs, floor=RECORDING_FLOOR)
    for first, second in pairs:
        check.add_step(first.step)
        difference = _first_difference(first, second, check)
        if difference is not None:
            if difference["cause"] == "":  # small or in one element only: the cause may lie in an earlier step
                difference["cause"] = _small_difference_cause(pairs, difference, check.unjudged)
            text = (
                f"different: first at {_format_step(difference)}, {difference['kind']} of {difference['parameter']}: "
                f"{difference['cause']}"
            )
            return Comparison(verdict="different", steps=steps, text=text, first=difference, recorded=recorded)
        worst = max(worst, _max_distance(first, second, check.unjudged))
    if not steps:
        raise UsageError(
            "the recordings have no step in common: no gradient was compared.",
            cause=f"the first has {_describe_steps(first_records)}, the other {_describe_steps(second_records)}",
            hint="record both from their first step on, with the same every=",
        )
    unjudged = tuple(check.unjudged)
    verdict = "rounding" if worst or unjudged else "bitwise"
    text = (
        f"{verdict}: {plural(steps, 'step')}, differing by at most "
        f"{worst:.1e}{_unjudged_note(unjudged)}{_uncompared_note(steps, recorded)}"
    )
    return Comparison(verdict=verdict, steps=steps, text=text, unjudged=unjudged, recorded=recorded, max_distance=worst)


def first_rank_difference(ranks: Sequence[Sequence[Record]]) -> dict[str, Any] | None:
    """Return the first step where the weights of a rank differ from rank 0's; of several ranks, the lowest.

    The result also names the parameter that differs most in this step. It is None if no rank differs. The initial
    weights (step 0) are not compared.
    """
    differences = [
        {"rank": rank, **difference}
        for rank, records in enumerate(ranks[1:], start=1)
        if (difference := _first_weight_difference(ranks[0], records)) is not None
    ]
    return min(differences, key=lambda difference: difference["step"], default=None)


def _first_weight_difference(records_of_first: Sequence[Record], records: Sequence[Record]) -> dict[str, Any] | None:
    records_by_step = {(record.step, record.optimizer): record for record in records}
    for record in records_of_first:
        record_of_rank = records_by_step.get((record.step, record.optimizer))
        if record_of_rank is None or record.step == 0:
            continue
        shared = sorted(set(record.weights) & set(record_of_rank.weights))
        distances = {
            n: d for n in shared if (d := record.weights[n].distance(record_of_rank.weights[n])) > RECORDING_FLOOR
        }
        if distances:
            name = max(distances, key=lambda n: distances[n])
            return {"step": record.step, "parameter": name, "distance": distances[name]}
    return None


def _unjudged_note(names: Sequence[str]) -> str:
    if not names:
        return ""
    suffix = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"; not judged, because their gradient is lost in rounding: {', '.join(names[:_MAX_NAMES])}{suffix}"


def _num_steps(records: Sequence[Record]) -> int:
    """Return the number of recorded steps, without step 0."""
    return len({record.step for record in records if record.step})


def _describe_steps(records: Sequence[Record]) -> str:
    steps = sorted({record.step for record in records if record.step})
    if not steps:
        return "the start only"
    return f"step {steps[0]}" if len(steps) == 1 else f"{plural(len(steps), 'step')} from {steps[0]} to {steps[-1]}"


def _uncompared_note(steps: int, recorded: tuple[int, int]) -> str:
    """Return a note about steps that only one recording has, which were not compared."""
    if recorded == (steps, steps):
        return ""
    return f"; only steps in both were compared: the first recording has {recorded[0]:,}, the other {recorded[1]:,}"


def _format_step(difference: Mapping[str, Any]) -> str:
    return f"step {difference['step']}" if difference["step"] else "the start"


def _first_difference(first: Record, second: Record, check: IllConditionedCheck) -> dict[str, Any] | None:
    """Return the difference of one step to report; None if all differences are rounding.

    It is a parameter that only one run has, else the gradient that differs most, else the weight that differs most.
    """
    for kind, first_fingerprints, second_fingerprints, is_rounding in (
        ("gradient", first.gradients, second.gradients, check.is_gradient_rounding),
        ("weight", first.weights, second.weights, check.is_weight_rounding),
    ):
        names = sorted(set(first_fingerprints) ^ set(second_fingerprints))
        if names:
            cause = f"only one run has a {kind} for it: not trained, frozen or not used in the other"
            return {"step": first.step, "kind": kind, "parameter": names[0], "cause": cause}
        distances = {name: first_fingerprints[name].distance(second_fingerprints[name]) for name in first_fingerprints}
        differing = {
            name: value
            for name, value in distances.items()
            if value > RECORDING_FLOOR and not is_rounding(name, first.step)
        }
        if differing:
            name = max(differing, key=lambda key: differing[key])
            cause = _difference_cause(kind, first, second, first_fingerprints, second_fingerprints, sorted(differing))
            return {"step": first.step, "kind": kind, "parameter": name, "distance": differing[name], "cause": cause}
    return None


def _difference_cause(
    kind: str,
    first: Record,
    second: Record,
    first_fingerprints: Mapping[str, Fingerprint],
    second_fingerprints: Mapping[str, Fingerprint],
    differing: Sequence[str],
) -> str:
    """Return the cause of a difference; empty if the difference is small or in one element only.

    The cause of such a difference may lie in an earlier step.
    """
    share = f"{len(differing)} of {len(first_fingerprints)} parameters"
    if first.step == 0:
        return (
            f"the weights differ before the first step ({share}): a different seed, different initial "
            "values, or a checkpoint"
        )
    if kind == "weight":
        return f"equal gradients, different weights ({share}): the optimizer, its groups or its state"
    if first.batch is not None and second.batch is not None and first.batch != second.batch:
        return f"the batches differ ({share}): data order"
    if len(differing) == 1 and _is_one_element(first_fingerprints[differing[0]], second_fingerprints[differing[0]]):
        return ""
    factors = [factor_between(first_fingerprints[name], second_fingerprints[name]) for name in differing]
    known_factors = [factor for factor in factors if factor is not None]
    largest = max((abs(factor) for factor in known_factors), default=0.0)
    if len(known_factors) < len(factors) or max(known_factors) - min(known_factors) > PROPORTIONAL_TOLERANCE * largest:
        return (
            f"the gradients differ, and not by one common factor ({share}). Possible causes: different samples, "
            "different random numbers, counts that differ between ranks or microbatches (a mean of means), or only "
            "one rank's gradient"
        )
    if largest == 0.0:
        return f"zero in one run only ({share}): a missing part of the loss, or a gradient that was cleared"
    factor = known_factors[0]
    if abs(factor - 1.0) <= _FACTOR_TOLERANCE or not has_factor(
        first_fingerprints[differing[0]], second_fingerprints[differing[0]]
    ):
        return ""
    if factor < 0.0:
        return f"a factor of {factor:.4g} ({share}): a wrong sign"
    return (
        f"a factor of {factor:.4g} ({share}): a sum instead of a mean, a missing or double reduction, or a scaled loss"
    )


def _small_difference_cause(
    pairs: Sequence[tuple[Record, Record]], difference: Mapping[str, Any], unjudged: Collection[str]
) -> str:
    """Return the cause of a gradient difference that is small or in one element only."""
    size, name = difference["distance"], difference["parameter"]
    first, second = next(
        (left.gradients[name], right.gradients[name])
        for left, right in pairs
        if left.step == difference["step"] and name in left.gradients
    )
    if _is_one_element(first, second):
        return f"one element differs, by {size:.1e} of the norm; the others are equal or nearly so"
    diverged = _diverged_weights(pairs, unjudged)
    if diverged is not None:
        step, weight, distance = diverged
        return (
            f"nearly equal: the gradients differ by {size:.1e} of their norm. Already after step {step} the weights "
            f"differed ({distance:.1e} in {weight}), after equal gradients: the optimizer's settings, such as weight "
            "decay, the optimizer's state, or amplified rounding"
        )
    if has_factor(first, second):
        return f"a factor of {factor_between(first, second):.7g}: a slightly different scale of the loss or its count"
    text = f"nearly equal: the gradients differ by {size:.1e} of their norm"
    return f"{text}, in a few elements or in a small part of the samples"


def _diverged_weights(
    pairs: Sequence[tuple[Record, Record]], unjudged: Collection[str]
) -> tuple[int, str, float] | None:
    """Return step, name and distance of the first weight that differs after equal gradients; None if there is none."""
    for first, second in pairs:
        for kind, left, right in (
            ("gradient", first.gradients, second.gradients),
            ("weight", first.weights, second.weights),
        ):
            distances = {n: left[n].distance(right[n]) for n in left if n in right and n not in unjudged}
            name = max(distances, key=distances.__getitem__, default="")
            if name and distances[name] > _EQUAL_WEIGHTS_DISTANCE:
                return (first.step, name, distances[name]) if kind == "weight" and first.step else None
    return None


def _is_one_element(first: Fingerprint, second: Fingerprint) -> bool:
    """Return True if only one element differs: then all projections differ by the same amount, up to the sign."""
    sizes = [abs(a - b) for a, b in zip(first.projections, second.projections, strict=True)]
    return first.numel > 1 and max(sizes) - min(sizes) <= _FACTOR_TOLERANCE * max(sizes)


def _max_distance(first: Record, second: Record, unjudged: Collection[str]) -> float:
    pairs = [(first.gradients[n], second.gradients[n]) for n in first.gradients if n not in unjudged]
    pairs += [(first.weights[n], second.weights[n]) for n in first.weights if n not in unjudged]
    return max((a.distance(b) for a, b in pairs), default=0.0)
