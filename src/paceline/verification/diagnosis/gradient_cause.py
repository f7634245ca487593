"""Find the likely cause of a wrong gradient: a mistake that gives microbatches wrong weights in the sum.

The reference knows the contribution g_j of microbatch j. The correct gradient is G = (1/C) * sum_j g_j, where C is the
global count. Most mistakes weight the contributions: G = (1/C) * sum_j w_j g_j. The weights identify the mistake. On R
ranks, for example, a sum instead of an average gives w_j = R. A missing reduction gives w_j = 0 for the microbatches of
other ranks. A mean of means gives w_j = C / (R * c_r), where c_r is the count of the rank that runs microbatch j.

The weights of every known mistake are tried. They explain the error if they leave only noise. If several do, other
facts decide: whether the ranks agree, whether the samples are right, and whether all parameters are wrong. If no known
weights fit, they are fitted by least squares: one for all, one per rank, one per microbatch, or one per parameter.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.verification.diagnosis.gradient_evidence import GradientEvidence, Vector
from paceline.verification.diagnosis.hypotheses import GradientFacts, list_hypotheses
from paceline.verification.diagnosis.swapped_gradients import explain_swapped


def explain_gradient(
    evidence: Sequence[GradientEvidence],
    *,
    counts: Sequence[float],
    ranks: int,
    num_parameters: int,
    num_differing: int | None = None,
    samples: int | None = None,
    is_data_correct: bool | None = None,
    axes: Mapping[str, int] | None = None,
    replica_names: Sequence[str] = (),
) -> str | None:
    """Return the mistake whose microbatch weights explain the wrong gradients; None if there is none.

    `evidence` has the worst of the `num_differing` wrong gradients. `counts` is the count of each microbatch, `samples`
    the number of samples in the batch, `num_parameters` the number of parameters. The other arguments are those of
    `GradientFacts`.
    """
    differing = num_differing or len(evidence)
    facts = GradientFacts(
        counts=np.asarray(counts, dtype=np.float64),
        ranks=ranks,
        samples=samples,
        ranks_agree=all(item.ranks_agree for item in evidence) if evidence[0].by_copy else None,
        is_everywhere=differing == num_parameters,
        is_data_correct=is_data_correct,
        axes=axes or {},
        replica_names=replica_names,
    )
    share = _describe_share(evidence, differing, num_parameters)
    explanation = _find_explanation(evidence, facts)
    if explanation is not None:
        return f"{explanation} ({share})"
    worst_explanation = _find_explanation(evidence[:1], facts) if len(evidence) > 1 else None
    return (
        worst_explanation
        and f"{worst_explanation} ({evidence[0].name}; {len(evidence) - 1} more differ, not all in the same way)"
    )


def unexplained_gradient(
    evidence: Sequence[GradientEvidence],
    *,
    num_parameters: int,
    num_differing: int | None = None,
    is_data_correct: bool | None = None,
) -> str:
    """Return the causes that remain possible if no microbatch weights explain the wrong gradients."""
    share = _describe_share(evidence, num_differing or len(evidence), num_parameters)
    inputs = "" if is_data_correct else "different inputs, "
    return (
        "no weighting of the microbatches' gradients explains this: different random numbers (dropout), "
        f"{inputs}or different arithmetic ({share})"
    )


def _describe_share(evidence: Sequence[GradientEvidence], differing: int, num_parameters: int) -> str:
    if differing == num_parameters:
        return "every parameter"
    names = ", ".join(item.name for item in evidence[:3]) + (" ..." if differing > 3 else "")
    return f"{differing} of {num_parameters}: {names}"


def _find_explanation(evidence: Sequence[GradientEvidence], facts: GradientFacts) -> str | None:
    matching = [guess for guess in list_hypotheses(facts) if _fits(guess.weights, evidence)]
    if matching:
        return min(matching, key=lambda guess: guess.contradiction_penalty(facts)).cause
    return (
        _find_added_direction(evidence) or explain_swapped(evidence, facts) or _describe_fitted_weights(evidence, facts)
    )


def _fits(weights: Vector, evidence: Sequence[GradientEvidence]) -> bool:
    """Return True if these microbatch weights leave only noise in every parameter. Noise grows with the weights."""
    if np.allclose(weights, 1.0):
        return False
    amplification = max(1.0, float(np.max(np.abs(weights), initial=0.0)))
    return all(
        float(np.linalg.norm(item.observed - weights @ item.contributions))
        <= max(item.max_residual, amplification * item.floor)
        for item in evidence
    )


def _find_added_direction(evidence: Sequence[GradientEvidence]) -> str | None:
    """Return the mistake that added a known vector, such as weight decay, to the correct gradient; None if none did."""
    for description in evidence[0].added_directions:
        if all(
            description in item.added_directions
            and _is_multiple_of(item.observed - item.expected, item.added_directions[description], item)
            for item in evidence
        ):
            return description
    return None


def _is_multiple_of(error: Vector, direction: Vector, item: GradientEvidence) -> bool:
    size = float(direction @ direction)
    if size == 0.0:
        return False
    return float(np.linalg.norm(error - (error @ direction / size) * direction)) <= item.max_residual


def _describe_fitted_weights(evidence: Sequence[GradientEvidence], facts: GradientFacts) -> str | None:
    """Describe the smallest set of fitted factors that explains the evidence; None if no set does."""
    num_microbatches = len(facts.counts)
    common = _fit_weights(evidence, np.ones((num_microbatches, 1)))
    if common is not None:
        return f"the gradient is {common[0]:.4g} times what it should be: a scaled loss"
    by_rank = _fit_weights(evidence, np.eye(min(facts.ranks, num_microbatches))[facts.rank_of_microbatch])
    if by_rank is not None:
        shown = ", ".join(f"{value:.4g}" for value in by_rank)
        operation = "clipped" if np.all(by_rank < 1.0 + 1e-6) and np.all(by_rank > 0.0) else "scaled or divided"
        differing = np.flatnonzero(np.abs(by_rank - 1.0) > 1e-6)
        if len(differing) == 1:
            only_rank = facts.rank_name(int(differing[0]))
            operation = f"it is scaled only on {only_rank}, by a hook or a rank-dependent loss, or {operation}"
        return f"each rank's share has its own factor ({shown}): {operation} per rank before the reduction"
    by_micro = _fit_weights(evidence, np.eye(num_microbatches))
    if by_micro is not None:
        shown = ", ".join(f"{value:.3g}" for value in by_micro[:8]) + (", ..." if num_microbatches > 8 else "")
        return f"the microbatches have the weights {shown} instead of 1: clipped, scaled or selected one by one"
    if len(evidence) > 1 and all(_fit_weights([item], np.ones((num_microbatches, 1))) is not None for item in evidence):
        return "each parameter is scaled separately: clipping or scaling per parameter, or a group's own rule"
    return None


def _fit_weights(evidence: Sequence[GradientEvidence], pattern: Vector) -> Vector | None:
    """Return x such that the weights `pattern @ x` fit best; None if x is not unique, or leaves more than noise."""
    num_unknowns = pattern.shape[1]
    if sum(item.observed.size for item in evidence) < 2 * num_unknowns:
        return None
    scales = [1.0 / max(item.max_residual, 1e-300) for item in evidence]
    coefficients = np.concatenate(
        [(pattern.T @ item.contributions).T * s for item, s in zip(evidence, scales, strict=True)]
    )
    targets = np.concatenate([item.observed * s for item, s in zip(evidence, scales, strict=True)])
    if not (np.all(np.isfinite(coefficients)) and np.all(np.isfinite(targets))):
        return None
    solution, _, rank, _ = np.linalg.lstsq(coefficients, targets, rcond=1e-9)
    if rank < num_unknowns or not _fits(pattern @ solution, evidence):
        return None
    weights: Vector = solution
    return weights


def data_cause(actual: Mapping[int, Sequence[int]], expected: Mapping[int, Sequence[int]]) -> str | None:
    """Return the fault in the samples that were read, by microbatch; None if they are the expected ones."""
    if {k: list(v) for k, v in actual.items()} == {k: list(v) for k, v in expected.items()}:
        return None
    actual_samples = [sample for samples in actual.values() for sample in samples]
    expected_samples = [sample for samples in expected.values() for sample in samples]
    missing = sorted(set(expected_samples) - set(actual_samples))
    foreign = sorted(set(actual_samples) - set(expected_samples))
    repeated = sorted(
        {sample for sample in actual_samples if actual_samples.count(sample) > expected_samples.count(sample)}
        - set(foreign)
    )
    if repeated and missing:
        return f"data order: ranks read the same samples ({repeated[:4]} twice, {missing[:4]} never)"
    if foreign:
        return f"data order: different samples were read ({foreign[:4]} instead of {missing[:4]})"
    if missing:
        return f"data order: samples were dropped ({missing[:4]})"
    if repeated:
        return f"data order: samples were repeated ({repeated[:4]})"
    return "data order: the same samples in different microbatches"
