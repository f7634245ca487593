"""The diagnosis on simulated ranks names planted faults correctly and is silent on correct runs."""

import numpy as np
import pytest

from paceline.verification.diagnosis.gradient_cause import (
    GradientEvidence,
    data_cause,
    explain_gradient,
    unexplained_gradient,
)

NAMES = ("a.weight", "a.bias", "b.weight")


def contributions(seed: int, num_micro: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal((num_micro, size)) for name, size in zip(NAMES, (40, 6, 24), strict=True)}


def cause_of(
    weights: dict[str, np.ndarray], *, ranks: int, counts: np.ndarray, seed: int = 0, noise: float = 1e-9
) -> str:
    given = contributions(seed, len(counts))
    rng = np.random.default_rng(seed + 1)
    evidence = []
    for name, rows in given.items():
        found = weights.get(name, np.ones(len(counts))) @ rows
        found = found + noise * rng.standard_normal(found.shape)
        if np.linalg.norm(found - rows.sum(0)) > 1e-6:
            evidence.append(GradientEvidence(name=name, observed=found, contributions=rows, floor=1e-7))
    found = explain_gradient(evidence, counts=list(counts), ranks=ranks, num_parameters=len(NAMES))
    return found or unexplained_gradient(evidence, num_parameters=len(NAMES))


def everywhere(weights: np.ndarray) -> dict[str, np.ndarray]:
    return dict.fromkeys(NAMES, weights)


CASES = {
    "loss multiplied by the ranks": (lambda o, c, r: everywhere(np.full(len(c), float(r))), "a factor of 3"),
    "divided twice": (lambda o, c, r: everywhere(np.full(len(c), 1 / r)), "1/3"),
    "one reduced twice": (lambda o, c, r: {"b.weight": np.full(len(c), float(r))}, "1 of 3: b.weight"),
    "one not reduced": (lambda o, c, r: {"a.bias": (o == 0) * 1.0}, "not reduced: rank 0"),
    "one not reduced but averaged": (lambda o, c, r: {"a.bias": (o == 1) / r}, "rank 1's own gradient, divided by the ranks"),
    "mean of ranks' means": (
        lambda o, c, r: everywhere(np.array([c.sum() / (r * c[o == o[j]].sum()) for j in range(len(c))])),
        "divided by each rank's own count",
    ),
    "mean of microbatches' means": (
        lambda o, c, r: everywhere(c.sum() / (len(c) * c)), "divided by each microbatch's own count"),
    "frozen on one rank": (lambda o, c, r: {"a.weight": (o != 2) * 1.0, "a.bias": (o != 2) * 1.0}, "missing on rank 2"),
    "same samples on all ranks": (lambda o, c, r: everywhere((o == 0) * float(r)), "all ranks have rank 0's samples"),
    "a microbatch dropped": (lambda o, c, r: everywhere((np.arange(len(c)) != 4) * 1.0), "microbatch 4 is missing"),
    "a microbatch twice": (lambda o, c, r: everywhere(1.0 + (np.arange(len(c)) == 4)), "microbatch 4 counts twice"),
    "never trained": (lambda o, c, r: {"b.weight": np.zeros(len(c))}, "not trained"),
    "not divided by the rounds": (lambda o, c, r: everywhere(np.full(len(c), 2.0)), "accumulated without dividing"),
    "a scaled loss": (lambda o, c, r: everywhere(np.full(len(c), 1.37)), "1.37 times"),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_planted_faults(name: str, seed: int) -> None:
    ranks, counts = 3, np.array([5.0, 9.0, 7.0, 3.0, 8.0, 6.0])
    owner = np.arange(len(counts)) % ranks
    weights, expected = CASES[name]
    assert expected in cause_of(weights(owner, counts, ranks), ranks=ranks, counts=counts, seed=seed)


def test_other_random_numbers_fit_nothing() -> None:
    rng = np.random.default_rng(5)
    rows = rng.standard_normal((6, 40))
    evidence = [GradientEvidence(name="w", observed=rng.standard_normal(40), contributions=rows, floor=1e-7)]
    assert explain_gradient(evidence, counts=[1.0] * 6, ranks=3, num_parameters=1) is None
    assert "different random numbers" in unexplained_gradient(evidence, num_parameters=1)


def test_all_wrong_parameters_are_counted_although_few_are_examined() -> None:
    rng = np.random.default_rng(5)
    evidence = [
        GradientEvidence(name=f"w{k}", observed=rng.standard_normal(4), contributions=np.ones((2, 4)), floor=1e-7)
        for k in range(4)
    ]
    text = unexplained_gradient(evidence, num_parameters=40, num_differing=30)
    assert "(30 of 40: w0, w1, w2 ...)" in text


def test_data_order_is_named() -> None:
    right = {0: (1, 2), 1: (3, 4)}
    assert data_cause(right, right) is None
    assert "same samples" in str(data_cause({0: (1, 2), 1: (1, 2)}, right))
    assert "dropped" in str(data_cause({0: (1, 2), 1: (3,)}, right))
    assert "repeated" in str(data_cause({0: (1, 2), 1: (3, 4, 4)}, right))
    assert "different microbatches" in str(data_cause({0: (3, 4), 1: (1, 2)}, right))
