"""The list of longer cases names tests that are there."""

from pathlib import Path

import pytest

from tests.longer import PROPERTY_TESTS, SOAK, is_extra_seed, is_longer

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("file", sorted({name.partition("::")[0] for name in SOAK}))
def test_what_waits_for_soak_is_there(file: str) -> None:
    text = (TESTS / file).read_text()
    for name in (one.partition("::")[2].partition("[")[0] for one in SOAK if one.startswith(f"{file}::")):
        assert f"def {name}(" in text, name


def test_a_case_waits_alone_and_a_test_with_all_of_its_cases() -> None:
    assert is_longer(
        "end_to_end/test_exact_mode_on_any_rank_count.py::test_any_number_of_ranks_gives_the_one_process_weights[5]"
    )
    assert not is_longer(
        "end_to_end/test_exact_mode_on_any_rank_count.py::test_any_number_of_ranks_gives_the_one_process_weights[2]"
    )
    assert is_longer("step/test_local_sgd.py::test_a_site_may_be_any_layout[dp_replicate=2,dp_shard=2]")


@pytest.mark.parametrize("file", PROPERTY_TESTS)
def test_half_of_the_drawn_cases_are_daily(file: str) -> None:
    assert 'parametrize("seed"' in (TESTS / file).read_text()
    assert is_extra_seed(f"{file}::test_any[1]", 1) and not is_extra_seed(f"{file}::test_any[2]", 2)
    assert not is_extra_seed("verification/test_no_false_alarm_on_simulated_ranks.py::test_no_false_alarm[1]", 1)
