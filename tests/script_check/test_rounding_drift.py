"""A small part of a gradient that differs after equal steps is drift; a factor, a large part and an early one are not."""

import numpy as np
import pytest

from paceline.script_check.comparison.rounding_drift import is_drift
from paceline.verification.fingerprints.fingerprint import NUM_PROJECTIONS, Fingerprint, Record


def fingerprint(seed: int, *, factor: float = 1.0, noise: float = 0.0) -> Fingerprint:
    draws = np.random.default_rng(seed)
    values = factor * draws.standard_normal(NUM_PROJECTIONS) + noise * draws.standard_normal(NUM_PROJECTIONS)
    return Fingerprint(numel=100, norm=1.0, largest=0.1, projections=tuple(values), digest=str((seed, factor, noise)))


def run(*, step: int, factor: float = 1.0, noise: float = 0.0, others: int = 1) -> list[Record]:
    """Return steps 0 to `step`; only the last one has a factor, or noise, in one of its parameters."""
    records = []
    for number in range(step + 1):
        change = {"factor": factor, "noise": noise} if number == step else {}
        gradients = {"first": fingerprint(1, **change), **{f"other{n}": fingerprint(2 + n) for n in range(others)}}
        records.append(Record(step=number, gradients=gradients if number else {}, weights={}))
    return records


@pytest.mark.parametrize(
    ("step", "change", "expected"),
    [
        (4, {"noise": 0.02}, True),
        (3, {"noise": 0.02}, False),
        (4, {"noise": 0.5}, False),
        (4, {"noise": 0.5, "others": 200}, True),
        (4, {"factor": 1.02}, False),
    ],
)
def test_what_counts_as_drift(step: int, change: dict[str, float], expected: bool) -> None:
    others = int(change.pop("others", 1))
    pair = run(step=step, others=others), run(step=step, others=others, **change)
    assert is_drift(*pair, step=step) is expected
