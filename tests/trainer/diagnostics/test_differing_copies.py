"""The wrong one of two copies is the one that is much further from the recomputed value; otherwise nobody is blamed."""

import math

import pytest

from paceline.trainer.diagnostics.differing_copies import find_wrong_copy
from paceline.trainer.diagnostics.replica_check import find_odd_ranks


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"0": 1.5, "1": 0.5}, "0"),
        ({"0": 0.5, "1": 1.5}, "1"),
        ({"0": 0.5, "1": math.nan}, "1"),
        ({"0": math.nan, "1": 0.5}, "0"),
        ({"0": 0.5, "1": math.inf}, "1"),
        ({"0": 0.51, "1": 1.5}, "1"),  # the gradients of the wrong copy changed the right one
        ({"0": 0.6, "1": 0.35}, None),  # both have drifted
        ({"0": math.nan, "1": math.inf}, None),
        ({"0": 0.5, "1": 0.5}, None),
    ],
)
def test_the_wrong_copy(values: dict[str, float], wrong: str | None) -> None:
    assert find_wrong_copy(values, 0.5) == wrong


@pytest.mark.parametrize(
    ("checksums", "odd", "has_majority"),
    [
        ({0: 5, 1: 7, 2: 7}, [0], True),
        ({0: 7, 1: 7, 2: 5}, [2], True),
        ({0: 7, 1: 5}, [1], False),
        ({2: 7, 5: 5}, [5], False),
        ({0: 1, 1: 1, 2: 2, 3: 2}, [2, 3], False),
        ({0: 1, 1: 2, 2: 3}, [1, 2], False),
    ],
)
def test_the_majority_of_equal_copies_is_right(checksums: dict[int, int], odd: list[int], has_majority: bool) -> None:
    assert find_odd_ranks(checksums) == (odd, has_majority)
