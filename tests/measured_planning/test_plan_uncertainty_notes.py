"""A plan reports what it could not find out about the layout that it recommends."""

from dataclasses import replace

import pytest

from paceline.measured_planning.plan_worker import _unverified_lines
from paceline.planner.advice.recommendations import PlanRow
from paceline.planner.cost.estimate import MeasuredTime
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.trainer.checks.parallel_checks import is_small_enough
from tests.planner.advice.test_named_layouts import made

FORECAST = made("8xH100-80G")
NOT_REPLAYED, NOT_TRIED = "its memory is an estimate", "may change its results"


def row(candidate: Candidate, *, replayed: bool = True, timed: bool = False, refused: str = "") -> PlanRow:
    estimate = FORECAST.estimate(candidate)
    assert estimate.fits
    ran = MeasuredTime(seconds=1.0, spread=0.1, steps=5, blocks=(2, 4)) if timed else None
    return PlanRow(family="fsdp", estimate=replace(estimate, measured_time=ran), replayed=replayed, refused=refused)


PLAIN, PARTS = Candidate(dp_shard=8, zero=3, remat="full"), Candidate(dp_shard=4, zero=3, remat="full", cp=2)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ((row(PLAIN),), []),
        ((row(PLAIN, replayed=False),), [NOT_REPLAYED]),
        ((row(PARTS),), [NOT_TRIED, "--layout cp=2"]),
        ((row(PARTS, replayed=False),), [NOT_REPLAYED, NOT_TRIED, "--layout cp=2"]),
        ((row(PARTS, timed=True),), []),
        ((row(PLAIN), row(PARTS, replayed=False)), []),
        ((row(PARTS, refused="different outputs"), row(PLAIN, replayed=False)), [NOT_REPLAYED]),
        ((row(PLAIN, refused="different outputs"),), []),
    ],
    ids=["none", "no time", "parts", "both", "timed", "of another", "of the first that can be had", "nothing fits"],
)
def test_what_is_not_known_of_the_recommended_layout_is_said(rows: tuple[PlanRow, ...], said: list[str]) -> None:
    lines = list(_unverified_lines(rows, FORECAST.profile))
    assert len(lines) == len(said) and all(words in line for words, line in zip(said, lines, strict=True))


def test_a_small_model_is_tried_with_its_numbers() -> None:
    sizes = Decoder(layers=4, width=256, mlp_width=1024, heads=4, vocabulary=1000)
    facts = build_decoder_profile(sizes, name="small", length=8192, global_batch_size=64)
    assert is_small_enough(facts.parameters) and not is_small_enough(FORECAST.profile.parameters)
    assert list(_unverified_lines((row(PARTS),), facts)) == []
