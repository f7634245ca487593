"""Runs that drift apart after several equal steps, as rounding makes them do where a ReLU switches.

Weights that differ by rounding can put one activation on the other side of a kink. The gradients of this step then
differ by the share of one sample in one unit: far more than rounding, and far less than any mistake in the loop makes
of the whole gradient.
"""

from collections.abc import Sequence

import numpy as np

from paceline.verification.fingerprints.fingerprint import Record
from paceline.verification.fingerprints.ill_conditioned import has_factor

_MIN_EQUAL_STEPS = 3  # before the difference
_MAX_SHARE = 0.05  # of the norm of the whole gradient


def is_drift(first: Sequence[Record], second: Sequence[Record], *, step: int) -> bool:
    """Return whether the first difference, in the gradients of `step`, may be rounding that has grown."""
    by_key = {(record.step, record.optimizer): record for record in second}
    pairs = [(r, by_key[r.step, r.optimizer]) for r in first if (r.step, r.optimizer) in by_key]
    num_before = len({one.step for one, _ in pairs if 0 < one.step < step})
    differing = [pair for pair in pairs if pair[0].step == step]
    return num_before >= _MIN_EQUAL_STEPS and all(_is_small(*pair) for pair in differing)


def _is_small(one: Record, other: Record) -> bool:
    """Return whether the gradients differ by a small part of their common norm, and by no common factor."""
    if one.gradients.keys() != other.gradients.keys():
        return False
    sizes = {name: max(each.norm, other.gradients[name].norm) for name, each in one.gradients.items()}
    distances = {name: each.distance(other.gradients[name]) * sizes[name] for name, each in one.gradients.items()}
    whole = float(np.linalg.norm(list(sizes.values())))
    share = float(np.linalg.norm(list(distances.values()))) / whole if whole else 0.0
    largest = max(distances, key=distances.__getitem__)
    return share <= _MAX_SHARE and not has_factor(one.gradients[largest], other.gradients[largest])
