"""No false alarm: random jobs from a seed go through all of `verify`, in ranks that serve many jobs."""

from collections import Counter
from pathlib import Path

import pytest

from tests.verification.random_jobs import LAYOUTS, Draw, draw, is_asynchronous
from tests.verification.verify_random_jobs import in_order, play

ALL = 500


def alarms(draws: list[Draw], log: Path) -> tuple[list[str], Counter[str]]:
    """What was called different or did not end, in words; and how many of each verdict there were."""
    wrong, counts = [], Counter[str]()
    for one, answer in play(draws, log=log):
        counts[answer["state"]] += 1
        if answer["state"] not in ("bitwise", "rounding", "refused"):
            first = answer.get("first_difference") or answer.get("why")
            wrong.append(f"{answer['state']}: {one}: {first}")
    return wrong, counts


def test_a_handful_of_sound_draws_gives_no_alarm(tmp_path: Path) -> None:
    wrong, counts = alarms([draw(seed) for seed in (7, 8)], tmp_path)
    assert not wrong, "\n".join(wrong)
    assert counts["bitwise"] + counts["rounding"] == 2, counts


@pytest.mark.soak
def test_five_hundred_sound_draws_give_no_alarm(tmp_path: Path) -> None:
    wrong, counts = alarms(in_order(range(ALL)), tmp_path)
    assert not wrong, "\n".join(wrong)
    assert counts["refused"] < ALL // 10, counts


def test_the_draws_are_a_mixture() -> None:
    """Each kind of what can be drawn is in the five hundred, more than a few times."""
    draws = [draw(seed) for seed in range(ALL)]
    layouts = Counter(one.layout for one in draws)
    assert all(layouts[layout] >= 3 for each in LAYOUTS.values() for layout in each), layouts
    precisions = Counter(one.settings["train.precision"] for one in draws)
    assert min(precisions[kind] for kind in ("fp32", "bf16", "fp16")) >= 40, precisions
    kinds = Counter(name for one in draws for name, value in one.job.items() if value is True)
    assert all(kinds[name] >= 15 for name in ("ema", "frozen", "half", "schedule", "tied", "unused")), kinds
    assert sum(one.job.get("norm") == "batch" for one in draws) >= 50
    assert sum(one.compress != "none" for one in draws) >= 5 and sum(map(is_asynchronous, draws)) >= 5
