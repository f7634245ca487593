"""The likely cause of a wrong gradient, from the shape of its error.

The reference knows each microbatch's contribution, g_j. A right gradient is G = (1/C) * sum_j g_j. Every usual
mistake is another weighting, G = (1/C) * sum_j w_j g_j, and is identified by w: all N, zero for the microbatches
of other ranks, C / (R * c_r) for a mean of means. Each is tried; those that leave only noise explain the error,
and other facts (do the ranks agree? are the samples right? one layer or all?) decide between them. If
no known weighting fits, the weights are solved for: one for all, one per rank, one per microbatch, one per
parameter.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.verification.diagnosis.gradient_evidence import Evidence, Vector
from paceline.verification.diagnosis.hypotheses import GradientFacts, guesses
from paceline.verification.diagnosis.swapped_gradients import explain_swapped


def explain_gradient(
    evidence: Sequence[Evidence],
    *,
    counts: Sequence[float],
    ranks: int,
    num_parameters: int,
    num_differing: int | None = None,
    samples: int | None = None,
    is_data_right: bool | None = None,
    axes: Mapping[str, int] | None = None,
    members: Sequence[str] = (),
) -> str | None:
    """Return the weighting that explains the gradient, or None; `evidence` may be the worst of `num_differing`."""
    differing = num_differing or len(evidence)
    facts = GradientFacts(
        counts=np.asarray(counts, dtype=np.float64),
        ranks=ranks,
        samples=samples,
        agree=all(item.ranks_agree for item in evidence) if evidence[0].everywhere else None,
        everywhere=differing == num_parameters,
        data_right=is_data_right,
        axes=axes or {},
        members=members,
    )
    share = _share(evidence, differing, num_parameters)
    found = _explained(evidence, facts)
    if found is not None:
        return f"{found} ({share})"
    alone = _explained(evidence[:1], facts) if len(evidence) > 1 else None
    return alone and f"{alone} ({evidence[0].name}; {len(evidence) - 1} more differ, not all alike)"


def unexplained_gradient(
    evidence: Sequence[Evidence],
    *,
    num_parameters: int,
    num_differing: int | None = None,
    is_data_right: bool | None = None,
) -> str:
    """Return the remaining possible causes if no weighting fits."""
    share = _share(evidence, num_differing or len(evidence), num_parameters)
    inputs = "" if is_data_right else "different inputs, "
    return (
        "no weighting of the microbatches' gradients explains this: different random numbers (dropout), "
        f"{inputs}or different arithmetic ({share})"
    )


def _share(evidence: Sequence[Evidence], differing: int, num_parameters: int) -> str:
    if differing == num_parameters:
        return "every parameter"
    names = ", ".join(item.name for item in evidence[:3]) + (" ..." if differing > 3 else "")
    return f"{differing} of {num_parameters}: {names}"


def _explained(evidence: Sequence[Evidence], facts: GradientFacts) -> str | None:
    fitting = [guess for guess in guesses(facts) if _fits(guess.weights, evidence)]
    if fitting:
        return min(fitting, key=lambda guess: guess.strangeness(facts)).cause
    return _added(evidence) or explain_swapped(evidence, facts) or _solved(evidence, facts)


def _fits(weights: Vector, evidence: Sequence[Evidence]) -> bool:
    """Return True if these weights leave only noise in every parameter. Noise grows with the weights."""
    if np.allclose(weights, 1.0):
        return False
    grown = max(1.0, float(np.max(np.abs(weights), initial=0.0)))
    return all(
        float(np.linalg.norm(item.found - weights @ item.contributions)) <= max(item.allowed, grown * item.floor)
        for item in evidence
    )


def _added(evidence: Sequence[Evidence]) -> str | None:
    """Return what was added to the right gradient, if anything: the last step's, or the weights themselves."""
    for meaning in evidence[0].also:
        if all(
            meaning in item.also and _is_along(item.found - item.right, item.also[meaning], item) for item in evidence
        ):
            return meaning
    return None


def _is_along(error: Vector, direction: Vector, item: Evidence) -> bool:
    size = float(direction @ direction)
    if size == 0.0:
        return False
    return float(np.linalg.norm(error - (error @ direction / size) * direction)) <= item.allowed


def _solved(evidence: Sequence[Evidence], facts: GradientFacts) -> str | None:
    """Solve for the fewest weights that explain all: one, one per rank, one per microbatch, one per parameter."""
    num = len(facts.counts)
    together = _solve(evidence, np.ones((num, 1)))
    if together is not None:
        return f"the gradient is {together[0]:.4g} times what it should be: a scaled loss"
    by_rank = _solve(evidence, np.eye(min(facts.ranks, num))[facts.owner])
    if by_rank is not None:
        shown = ", ".join(f"{value:.4g}" for value in by_rank)
        what = "clipped" if np.all(by_rank < 1.0 + 1e-6) and np.all(by_rank > 0.0) else "scaled or divided"
        odd = np.flatnonzero(np.abs(by_rank - 1.0) > 1e-6)
        if len(odd) == 1:
            what = f"it is scaled only on {facts.who(int(odd[0]))}, by a hook or a rank-dependent loss, or {what}"
        return f"each rank's share has its own factor ({shown}): {what} per rank before the reduction"
    by_micro = _solve(evidence, np.eye(num))
    if by_micro is not None:
        shown = ", ".join(f"{value:.3g}" for value in by_micro[:8]) + (", ..." if num > 8 else "")
        return f"the microbatches have the weights {shown} instead of 1: clipped, scaled or selected one by one"
    if len(evidence) > 1 and all(_solve([item], np.ones((num, 1))) is not None for item in evidence):
        return "each parameter is scaled separately: clipping or scaling per parameter, or a group's own rule"
    return None


def _solve(evidence: Sequence[Evidence], pattern: Vector) -> Vector | None:
    """Solve least squares for weights `pattern @ x`; None if they leave more than noise or are not determined."""
    unknown = pattern.shape[1]
    if sum(item.found.size for item in evidence) < 2 * unknown:
        return None
    scales = [1.0 / max(item.allowed, 1e-300) for item in evidence]
    left = np.concatenate([(pattern.T @ item.contributions).T * s for item, s in zip(evidence, scales, strict=True)])
    right = np.concatenate([item.found * s for item, s in zip(evidence, scales, strict=True)])
    if not (np.all(np.isfinite(left)) and np.all(np.isfinite(right))):
        return None
    solution, _, rank, _ = np.linalg.lstsq(left, right, rcond=1e-9)
    if rank < unknown or not _fits(pattern @ solution, evidence):
        return None
    found: Vector = solution
    return found


def data_cause(found: Mapping[int, Sequence[int]], expected: Mapping[int, Sequence[int]]) -> str | None:
    """Return what is wrong with the samples that were consumed, by microbatch; None if nothing is."""
    if {k: list(v) for k, v in found.items()} == {k: list(v) for k, v in expected.items()}:
        return None
    have = [sample for samples in found.values() for sample in samples]
    want = [sample for samples in expected.values() for sample in samples]
    missing = sorted(set(want) - set(have))
    foreign = sorted(set(have) - set(want))
    repeated = sorted({sample for sample in have if have.count(sample) > want.count(sample)} - set(foreign))
    if repeated and missing:
        return f"data order: ranks read the same samples ({repeated[:4]} twice, {missing[:4]} never)"
    if foreign:
        return f"data order: different samples were read ({foreign[:4]} instead of {missing[:4]})"
    if missing:
        return f"data order: samples were dropped ({missing[:4]})"
    if repeated:
        return f"data order: samples were repeated ({repeated[:4]})"
    return "data order: the same samples in different microbatches"
