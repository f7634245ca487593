"""Find where two recordings diverge: the first step, the worst parameter, and the kind of difference."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.console.formatting import plural
from paceline.errors import UsageError
from paceline.verification.fingerprints.fingerprint import UNIT, Fingerprint, Record
from paceline.verification.fingerprints.ill_conditioned import SHAPE, IllConditionedCheck, factor_between, has_factor
from paceline.verification.rung_result import FLOOR

_NAMED = 3
_TRACE = 8 * UNIT  # equal gradients and equal optimizers leave weights closer than this
_NEAR_ONE = 0.01


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The verdict on two recordings; `first` is None if they differ by rounding at most.

    `steps` counts the steps in both, `recorded` those in each. `unjudged`: parameters whose gradient is lost in
    rounding, so that they give no evidence.
    """

    verdict: str
    steps: int
    text: str
    first: dict[str, Any] | None = None
    unjudged: tuple[str, ...] = ()
    recorded: tuple[int, int] = (0, 0)


def compare_recordings(a: Sequence[Record], b: Sequence[Record], *, same_ranks: bool = True) -> Comparison:
    """Compare step by step: gradients before the update, then weights after it; step 0 is the start.

    If `same_ranks` is false, a rank's own batch rightly differs and is not compared.

    Raises:
        UsageError: no step is in both, except for a start that is equal.
    """
    by_step = {(record.step, record.optimizer): record for record in b}
    pairs = [(r, by_step[r.step, r.optimizer]) for r in a if (r.step, r.optimizer) in by_step]
    if not same_ranks:
        pairs = [(replace(one, batch=None), replace(other, batch=None)) for one, other in pairs]
    steps, recorded = _num_steps([one for one, _ in pairs]), (_num_steps(a), _num_steps(b))
    worst = 0.0
    doubt = IllConditionedCheck(pairs, floor=FLOOR)
    for one, other in pairs:
        doubt.step(one.step)
        found = _first_in(one, other, doubt)
        if found is not None:
            if found["cause"] == "":
                found["cause"] = _cause_of_little(pairs, found, doubt.names)
            text = f"different: first at {_place(found)}, {found['kind']} of {found['parameter']}: {found['cause']}"
            return Comparison(verdict="different", steps=steps, text=text, first=found, recorded=recorded)
        worst = max(worst, _distance(one, other, doubt.names))
    if not steps:
        raise UsageError(
            "the recordings have no step in common: no gradient was compared.",
            cause=f"the first has {_steps_of(a)}, the other {_steps_of(b)}",
            hint="record both from their first step on, with the same every=",
        )
    unjudged = tuple(doubt.names)
    verdict = "rounding" if worst or unjudged else "bitwise"
    text = (
        f"{verdict}: {plural(steps, 'step')}, differing by at most "
        f"{worst:.1e}{_left_out(unjudged)}{_beyond(steps, recorded)}"
    )
    return Comparison(verdict=verdict, steps=steps, text=text, unjudged=unjudged, recorded=recorded)


def ranks_part(ranks: Sequence[Sequence[Record]]) -> dict[str, Any] | None:
    """Return where replicas of one run diverge: the first step, rank and parameter that differ from rank 0."""
    for rank, records in enumerate(ranks[1:], start=1):
        others = {(record.step, record.optimizer): record for record in records}
        for record in ranks[0]:
            other = others.get((record.step, record.optimizer))
            if other is None or record.step == 0:
                continue
            shared = sorted(set(record.weights) & set(other.weights))
            apart = {n: d for n in shared if (d := record.weights[n].distance(other.weights[n])) > FLOOR}
            if apart:
                name = max(apart, key=lambda n: apart[n])
                return {"step": record.step, "rank": rank, "parameter": name, "distance": apart[name]}
    return None


def _left_out(names: Sequence[str]) -> str:
    if not names:
        return ""
    rest = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"; not judged, because their gradient is lost in rounding: {', '.join(names[:_NAMED])}{rest}"


def _num_steps(records: Sequence[Record]) -> int:
    """Return the number of recorded steps, without the start."""
    return len({record.step for record in records if record.step})


def _steps_of(records: Sequence[Record]) -> str:
    found = sorted({record.step for record in records if record.step})
    if not found:
        return "the start only"
    return f"step {found[0]}" if len(found) == 1 else f"{plural(len(found), 'step')} from {found[0]} to {found[-1]}"


def _beyond(steps: int, recorded: tuple[int, int]) -> str:
    """Return a note about steps that only one recording has, which were not compared."""
    if recorded == (steps, steps):
        return ""
    return f"; only steps in both were compared: the first recording has {recorded[0]:,}, the other {recorded[1]:,}"


def _place(found: Mapping[str, Any]) -> str:
    return f"step {found['step']}" if found["step"] else "the start"


def _first_in(one: Record, other: Record, doubt: IllConditionedCheck) -> dict[str, Any] | None:
    for kind, left, right, is_rounding in (
        ("gradient", one.gradients, other.gradients, doubt.gradient),
        ("weight", one.weights, other.weights, doubt.weight),
    ):
        names = sorted(set(left) ^ set(right))
        if names:
            cause = f"only one run has a {kind} for it: not trained, frozen or not used in the other"
            return {"step": one.step, "kind": kind, "parameter": names[0], "cause": cause}
        distances = {name: left[name].distance(right[name]) for name in left}
        bad = {name: value for name, value in distances.items() if value > FLOOR and not is_rounding(name, one.step)}
        if bad:
            name = max(bad, key=lambda key: bad[key])
            cause = _cause(kind, one, other, left, right, sorted(bad))
            return {"step": one.step, "kind": kind, "parameter": name, "distance": bad[name], "cause": cause}
    return None


def _cause(
    kind: str,
    one: Record,
    other: Record,
    left: Mapping[str, Fingerprint],
    right: Mapping[str, Fingerprint],
    bad: Sequence[str],
) -> str:
    share = f"{len(bad)} of {len(left)} parameters"
    if one.step == 0:
        return (
            f"the weights differ before the first step ({share}): a different seed, different initial "
            "values, or a checkpoint"
        )
    if kind == "weight":
        return f"equal gradients, different weights ({share}): the optimizer, its groups or its state"
    if one.batch is not None and other.batch is not None and one.batch != other.batch:
        return f"the batches differ ({share}): data order"
    if len(bad) == 1 and _is_one_element(left[bad[0]], right[bad[0]]):
        return ""
    factors = [factor_between(left[name], right[name]) for name in bad]
    known = [factor for factor in factors if factor is not None]
    largest = max((abs(factor) for factor in known), default=0.0)
    if len(known) < len(factors) or max(known) - min(known) > SHAPE * largest:
        return (
            f"no common factor ({share}): different samples, different random numbers, counts that differ between "
            "ranks or microbatches (a mean of means), or only one rank's gradient"
        )
    if largest == 0.0:
        return f"zero in one run only ({share}): a missing part of the loss, or a gradient that was cleared"
    factor = known[0]
    if abs(factor - 1.0) <= _NEAR_ONE or not has_factor(left[bad[0]], right[bad[0]]):
        return ""
    if factor < 0.0:
        return f"a factor of {factor:.4g} ({share}): a wrong sign"
    return (
        f"a factor of {factor:.4g} ({share}): a sum instead of a mean, a missing or double reduction, or a scaled loss"
    )


def _cause_of_little(
    pairs: Sequence[tuple[Record, Record]], found: Mapping[str, Any], unjudged: Collection[str]
) -> str:
    """Return the cause of a small gradient difference: one element, weights that diverged before, or a small factor."""
    size, name = found["distance"], found["parameter"]
    one, other = next(
        (left.gradients[name], right.gradients[name])
        for left, right in pairs
        if left.step == found["step"] and name in left.gradients
    )
    if _is_one_element(one, other):
        return f"one element differs, by {size:.1e} of the norm; the others are equal or nearly so"
    before = _diverged_weights(pairs, unjudged)
    if before is not None:
        step, weight, distance = before
        return (
            f"nearly equal, {size:.1e} of its norm apart. Already after step {step} the weights differed "
            f"({distance:.1e} in {weight}), after equal gradients: the optimizer's settings, such as weight decay, its "
            "state, or rounding that it amplified"
        )
    if has_factor(one, other):
        return f"a factor of {factor_between(one, other):.7g}: a slightly different scale of the loss or its count"
    return f"nearly equal, {size:.1e} of its norm apart: a few elements differ, or a small part of the samples"


def _diverged_weights(
    pairs: Sequence[tuple[Record, Record]], unjudged: Collection[str]
) -> tuple[int, str, float] | None:
    """Return the first step whose weights differ by more than rounding while all gradients so far did not."""
    for one, other in pairs:
        for kind, left, right in (("gradient", one.gradients, other.gradients), ("weight", one.weights, other.weights)):
            apart = {n: left[n].distance(right[n]) for n in left if n in right and n not in unjudged}
            name = max(apart, key=apart.__getitem__, default="")
            if name and apart[name] > _TRACE:
                return (one.step, name, apart[name]) if kind == "weight" and one.step else None
    return None


def _is_one_element(one: Fingerprint, other: Fingerprint) -> bool:
    """Return True if one element differs: then each projection differs by that element, with one sign or the other."""
    sizes = [abs(a - b) for a, b in zip(one.projections, other.projections, strict=True)]
    return one.numel > 1 and max(sizes) - min(sizes) <= _NEAR_ONE * max(sizes)


def _distance(one: Record, other: Record, unjudged: Collection[str]) -> float:
    pairs = [(one.gradients[n], other.gradients[n]) for n in one.gradients if n not in unjudged]
    pairs += [(one.weights[n], other.weights[n]) for n in one.weights if n not in unjudged]
    return max((a.distance(b) for a, b in pairs), default=0.0)
