"""Swapped gradients are named; a mere resemblance is not."""

import numpy as np

from paceline.verification.diagnosis.gradient_cause import explain_gradient
from paceline.verification.diagnosis.gradient_evidence import GradientEvidence, Vector


def _evidence(name: str, found: Vector, contributions: Vector) -> GradientEvidence:
    return GradientEvidence(name=name, observed=found, contributions=contributions, floor=1e-9)


def _contributions(seed: int) -> Vector:
    return np.random.default_rng(seed).normal(size=(6, 40))


def test_two_gradients_exchanged_on_one_rank_are_named() -> None:
    one, other, owned = _contributions(1), _contributions(2), np.arange(6) % 3 == 2
    swap = other[owned].sum(0) - one[owned].sum(0)
    found = [_evidence("gate", one.sum(0) + swap, one), _evidence("up", other.sum(0) - swap, other)]
    cause = explain_gradient(found, counts=[1.0] * 6, ranks=3, num_parameters=5)
    assert cause is not None and "gate and up have each other's gradient on rank 2" in cause


def test_a_third_wrong_gradient_is_not_explained_by_an_exchange() -> None:
    one, other, third = (_contributions(seed) for seed in (1, 2, 3))
    noise = np.random.default_rng(4).normal(size=40)
    found = [
        _evidence("gate", other.sum(0), one),
        _evidence("up", one.sum(0), other),
        _evidence("down", third.sum(0) + noise, third),
    ]
    assert explain_gradient(found, counts=[1.0] * 6, ranks=3, num_parameters=5) is None
    whole = explain_gradient(found[:2], counts=[1.0] * 6, ranks=3, num_parameters=5)
    assert whole is not None and "on every rank" in whole
