"""Detect swapped gradients, which arise if ranks iterate over their parameters in different orders."""

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from paceline.verification.diagnosis.gradient_evidence import GradientEvidence
from paceline.verification.diagnosis.hypotheses import GradientFacts


def explain_swapped(evidence: Sequence[GradientEvidence], facts: GradientFacts) -> str | None:
    """Return which pairs of parameters have each other's gradient; None if such swaps do not explain all evidence."""
    remaining = list(range(len(evidence)))
    descriptions: list[str] = []
    for first, second in combinations(range(len(evidence)), 2):
        if (
            first not in remaining
            or second not in remaining
            or evidence[first].observed.size != evidence[second].observed.size
        ):
            continue
        for text, mask in _owner_masks(facts):
            if _fits(evidence[first], evidence[second], mask) and _fits(evidence[second], evidence[first], mask):
                descriptions.append(
                    f"{evidence[first].name} and {evidence[second].name} have each other's gradient {text}"
                )
                remaining = [index for index in remaining if index not in (first, second)]
                break
    if remaining or not descriptions:
        return None
    suffix = f", and {len(descriptions) - 1} more pairs" if len(descriptions) > 1 else ""
    return f"{descriptions[0]}{suffix}: they are swapped, because parameters are visited in a different order there"


def _owner_masks(facts: GradientFacts) -> Iterator[tuple[str, NDArray[np.bool_]]]:
    """Yield pairs of text and mask: the name of a rank, or of all ranks, and which microbatches run there."""
    for rank in range(facts.ranks if facts.ranks > 1 else 0):
        yield f"on rank {rank}", facts.rank_of_microbatch == rank
    yield "on every rank", np.ones(len(facts.counts), dtype=np.bool_)


def _fits(item: GradientEvidence, other: GradientEvidence, mask: NDArray[np.bool_]) -> bool:
    """Return True if `item` has the gradient of `other` in the masked microbatches, and no other error."""
    swapped = other.contributions[mask].sum(axis=0) - item.contributions[mask].sum(axis=0)
    error = item.observed - item.expected
    return bool(np.any(error)) and float(np.linalg.norm(error - swapped)) <= item.max_residual
