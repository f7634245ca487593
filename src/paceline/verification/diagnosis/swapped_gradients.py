"""Detection of swapped gradients, which arise if ranks iterate over their parameters in different orders."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from paceline.verification.diagnosis.gradient_evidence import Evidence
from paceline.verification.diagnosis.hypotheses import GradientFacts


def explain_swapped(evidence: Sequence[Evidence], facts: GradientFacts) -> str | None:
    """Return which pairs of equal size have swapped gradients, on one rank or all; None if other differences remain."""
    left = list(range(len(evidence)))
    said: list[str] = []
    for one, other in combinations(range(len(evidence)), 2):
        if one not in left or other not in left or evidence[one].found.size != evidence[other].found.size:
            continue
        for text, owned in _owners(facts):
            if _fits(evidence[one], evidence[other], owned) and _fits(evidence[other], evidence[one], owned):
                said.append(f"{evidence[one].name} and {evidence[other].name} have each other's gradient {text}")
                left = [index for index in left if index not in (one, other)]
                break
    if left or not said:
        return None
    more = f", and {len(said) - 1} more pairs" if len(said) > 1 else ""
    return f"{said[0]}{more}: they are swapped, because parameters are visited in a different order there"


def _owners(facts: GradientFacts) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    for rank in range(facts.ranks if facts.ranks > 1 else 0):
        yield f"on rank {rank}", facts.owner == rank
    yield "on every rank", np.ones(len(facts.counts), dtype=np.bool_)


def _fits(item: Evidence, other: Evidence, owned: NDArray[np.bool_]) -> bool:
    swapped = other.contributions[owned].sum(axis=0) - item.contributions[owned].sum(axis=0)
    error = item.found - item.right
    return bool(np.any(error)) and float(np.linalg.norm(error - swapped)) <= item.allowed
