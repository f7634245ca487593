"""The number of steps of a run, with a remainder."""

import pytest

from paceline.trainer.setup.duration import Length


@pytest.mark.parametrize(
    ("limits", "drop_last", "steps"),
    [
        ({"samples": 60}, False, 9),  # an epoch of 50 by 8 has 7 steps, 10 more samples 2
        ({"samples": 60}, True, 8),  # 6 whole steps, then 2
        ({"samples": 50}, False, 7),
        ({"samples": 51}, False, 8),
        ({"samples": 3}, False, 1),
        ({"samples": 99}, False, 14),  # 49 are left over: as many steps as an epoch
        ({"samples": 60, "steps": 5}, False, 5),
        ({"epochs": 1.5}, False, 11),
        ({"epochs": 0.01}, False, 1),
        ({"steps": 4}, False, 4),
    ],
)
def test_the_steps_of_a_length(limits: dict[str, float], drop_last: bool, steps: int) -> None:
    length = Length(epoch_samples=50, **limits)  # type: ignore[arg-type]
    assert length.total_steps(batch=8, drop_last=drop_last) == steps
