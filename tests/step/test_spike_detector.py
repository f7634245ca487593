"""A spike is a loss or a gradient norm far above the last ones; what is usual for the run is none."""

import math
import random

import pytest

from paceline.comm.process_group import World
from paceline.step.spike_detector import SpikeDetector, robust_distance


def detector(*, sigma: float = 10.0, values: int = 40, noise: float = 0.05) -> SpikeDetector:
    """A detector that has seen losses around 2 and gradient norms around 1."""
    rng, made = random.Random(0), SpikeDetector(sigma=sigma, skips=False, world=World.alone())
    for _ in range(values):
        assert not made.judge(rng.gauss(2.0, noise), math.exp(rng.gauss(0.0, noise)))
    return made


def test_a_spike_is_described_and_does_not_enter_the_history() -> None:
    made = detector()
    before = [*made.history]
    assert "the loss is 9, " in made.judge(9.0, 1.0) and "sigma above the median" in made.judge(9.0, 1.0)
    assert "the gradient norm is 30, " in made.judge(2.0, 30.0)
    assert made.history == before


@pytest.mark.parametrize(("loss", "norm"), [(2.2, 1.1), (0.1, 1.0), (2.0, 0.01), (2.0, None), (2.0, 0.0)])
def test_usual_and_low_values_are_no_spikes(loss: float, norm: float | None) -> None:
    assert detector().judge(loss, norm) == ""


def test_nothing_is_a_spike_before_enough_values_are_known() -> None:
    assert detector(values=15).judge(1e6, 1e6) == ""
    assert detector(values=16).judge(1e6, 1e6) != ""


def test_values_that_are_not_finite_are_left_to_the_finite_check() -> None:
    made = detector()
    before = [*made.history]
    assert made.judge(math.nan, 1.0) == made.judge(2.0, math.inf) == "" and made.history == before


def test_a_loss_that_never_changes_has_a_smallest_deviation() -> None:
    made = SpikeDetector(sigma=10.0, skips=False, world=World.alone())
    for _ in range(20):
        made.judge(2.0, 1.0)
    assert made.judge(2.1, 1.0) == "" and made.judge(2.3, 1.0) != ""


def test_the_history_follows_a_loss_that_falls() -> None:
    made = SpikeDetector(sigma=10.0, skips=False, world=World.alone())
    assert not any(made.judge(8.0 * 0.99**step, 1.0) for step in range(400))
    assert len(made.history) == 64


def test_the_distance_of_a_normal_sample_is_its_number_of_deviations() -> None:
    rng = random.Random(1)
    earlier = [rng.gauss(5.0, 2.0) for _ in range(4001)]
    assert robust_distance(11.0, earlier, smallest_sigma=0.0) == pytest.approx(3.0, rel=0.05)


def test_small_gradient_norms_are_compared_by_their_ratio() -> None:
    made = SpikeDetector(sigma=10.0, skips=False, world=World.alone())
    for _ in range(20):
        made.judge(2.0, 1e-3)
    assert made.judge(2.0, 0.0) == "" and made.judge(2.0, 1.05e-3) == ""
    assert "the gradient norm is 0.01, " in made.judge(2.0, 0.01)


def test_spikes_in_a_row_are_counted() -> None:
    made = detector()
    for number in range(1, 4):
        assert made.judge_jointly(9.0, 1.0) and made.num_in_a_row == number
    assert not made.judge_jointly(2.0, 1.0) and made.num_in_a_row == 0
