"""The likely cause of a wrong gradient, from the shape of its error.

The reference knows what each microbatch contributed, g_j. A right gradient is G = (1/C) * sum_j g_j. Every usual
mistake is another weighting, G = (1/C) * sum_j w_j g_j, and names itself by w: all N, zero for the microbatches
of other ranks, C / (R * c_r) for a mean of means. Each is tried; the one that leaves only noise is the cause.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_ENOUGH = 0.02


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One parameter: the layout's gradient times C, and each microbatch's contribution `[num_micro, numel]`."""

    name: str
    found: Vector
    contributions: Vector
    floor: float

    @property
    def right(self) -> Vector:
        """What it should be."""
        total: Vector = self.contributions.sum(axis=0)
        return total


@dataclass(frozen=True, kw_only=True)
class Guess:
    """A weighting and what it would mean."""

    cause: str
    weights: Vector


def find_cause(evidence: Sequence[Evidence], *, counts: Sequence[float], ranks: int, num_parameters: int) -> str:
    """What explains the differing parameters in `evidence`; `counts` per microbatch, dealt round robin."""
    guesses = _guesses(np.asarray(counts, dtype=np.float64), ranks)
    scores = {guess.cause: _score(guess, evidence) for guess in guesses}
    best = min(scores, key=lambda cause: scores[cause])
    names = ", ".join(item.name for item in evidence[:3]) + (" ..." if len(evidence) > 3 else "")
    share = "every parameter" if len(evidence) == num_parameters else f"{len(evidence)} of {num_parameters}: {names}"
    if scores[best] <= 1.0:
        return f"{best} ({share})"
    factor = _common_factor(evidence)
    if factor is not None:
        return f"the gradient is {factor:.4g} times what it should be: a scaled loss ({share})"
    mixed = _clipped(evidence)
    if mixed is not None:
        return f"each parameter is scaled by itself: {mixed} ({share})"
    return (
        "no weighting of the microbatches' gradients gives this: other random numbers (dropout), other inputs, "
        f"or other arithmetic ({share})"
    )


def _guesses(counts: Vector, ranks: int) -> list[Guess]:
    num = len(counts)
    owner = np.arange(num) % ranks
    ones = np.ones(num)
    total = counts.sum()
    per_rank = np.array([counts[owner == r].sum() for r in range(ranks)])
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_of_ranks = np.nan_to_num(total / (ranks * per_rank[owner]))
        mean_of_micro = np.nan_to_num(total / (num * counts))
    found = [
        Guess(
            cause=f"a factor of {ranks}: summed for averaged, reduced twice, or the loss times the ranks",
            weights=ones * ranks,
        ),
        Guess(
            cause=f"a factor of 1/{ranks}: averaged over ranks after the division by the count", weights=ones / ranks
        ),
        Guess(cause="not trained: the gradient is zero", weights=ones * 0.0),
        Guess(cause="a mean of means: divided by each rank's own count", weights=mean_of_ranks),
        Guess(cause="a mean of means: divided by each microbatch's own count", weights=mean_of_micro),
        Guess(cause="microbatches' means added up instead of averaged", weights=mean_of_micro * num),
        Guess(cause="accumulated without dividing", weights=ones * max(1, -(-num // ranks))),
    ]
    for rank in range(ranks if ranks > 1 else 0):
        alone = (owner == rank).astype(np.float64)
        share = total / per_rank[rank] if per_rank[rank] else 1.0
        found += [
            Guess(cause=f"not reduced: rank {rank}'s own gradient alone", weights=alone),
            Guess(cause=f"not reduced: rank {rank}'s own gradient, divided by its own count", weights=alone * share),
            Guess(cause=f"not reduced: rank {rank}'s own gradient, averaged over ranks", weights=alone / ranks),
            Guess(cause=f"all ranks have rank {rank}'s samples", weights=alone * ranks),
            Guess(cause=f"missing on rank {rank}: frozen, detached or skipped there", weights=1.0 - alone),
        ]
    for index in range(num if num > 1 else 0):
        one = np.zeros(num)
        one[index] = 1.0
        found.append(Guess(cause=f"microbatch {index} is missing: samples were dropped", weights=ones - one))
        found.append(Guess(cause=f"microbatch {index} counts twice: samples were repeated", weights=ones + one))
    return found


def _score(guess: Guess, evidence: Sequence[Evidence]) -> float:
    """The worst residual over the parameters, in units of what may be left over; at most 1 explains all."""
    if np.allclose(guess.weights, 1.0):
        return float("inf")
    worst = 0.0
    for item in evidence:
        residual = np.linalg.norm(item.found - guess.weights @ item.contributions)
        error = np.linalg.norm(item.found - item.right)
        worst = max(worst, float(residual) / max(_ENOUGH * float(error), item.floor))
    return worst


def _common_factor(evidence: Sequence[Evidence]) -> float | None:
    factors = [_factor(item) for item in evidence]
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(factors):
        return None
    return known[0] if max(known) - min(known) <= 1e-3 * max(map(abs, known)) else None


def _clipped(evidence: Sequence[Evidence]) -> str | None:
    if all(_factor(item) is not None for item in evidence):
        return "clipping or scaling per parameter, or a group's own rule"
    return None


def _factor(item: Evidence) -> float | None:
    right = item.right
    size = float(right @ right)
    if size == 0.0:
        return None
    factor = float(item.found @ right) / size
    left_over = float(np.linalg.norm(item.found - factor * right))
    return factor if left_over <= max(_ENOUGH * float(np.linalg.norm(item.found - right)), item.floor) else None


def data_cause(found: Mapping[int, Sequence[int]], expected: Mapping[int, Sequence[int]]) -> str | None:
    """What is wrong with the samples that were consumed, by microbatch; None if nothing is."""
    if {k: list(v) for k, v in found.items()} == {k: list(v) for k, v in expected.items()}:
        return None
    have = [sample for samples in found.values() for sample in samples]
    want = [sample for samples in expected.values() for sample in samples]
    missing = sorted(set(want) - set(have))
    repeated = sorted({sample for sample in have if have.count(sample) > want.count(sample)})
    if repeated and missing:
        return f"data order: ranks read the same samples ({repeated[:4]} twice, {missing[:4]} never)"
    if missing:
        return f"data order: samples were dropped ({missing[:4]})"
    if repeated:
        return f"data order: samples were repeated ({repeated[:4]})"
    return "data order: the same samples in other microbatches"
