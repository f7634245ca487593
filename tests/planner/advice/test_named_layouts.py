"""Named layouts are evaluated on a cluster, compared with each other and with a plan in a file, and drawn."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from paceline.console.formatting import format_size
from paceline.errors import LayoutError, PacelineError, UsageError
from paceline.planner.advice.named_layouts import evaluate_named_layouts
from paceline.planner.advice.plan_file_diff import diff_plan_files
from paceline.planner.advice.recommendations import advise
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import MeasuredTime
from paceline.planner.cost.memory import MEMORY_PARTS
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.search.evaluate_named_layout import (
    cost_model_from_json,
    estimate_from_row,
    estimate_named,
    find_row,
)
from paceline.planner.search.search_space import candidates
from paceline.reporting.plan_report import plan_page
from tests.planner.random_plans import forecast

LLAMA_8B = Decoder(layers=32, width=4096, mlp_width=14336, heads=32, kv_heads=8, vocabulary=128256)


def made(cluster: str = "8xH100-80G", *, batch: int = 64) -> CostModel:
    facts = build_decoder_profile(LLAMA_8B, name="8B", length=8192, global_batch_size=batch)
    return CostModel(profile=facts, cluster=parse_cluster(cluster))


def answer(drawn: CostModel, *layouts: str) -> dict[str, Any]:
    """As `plan` gives it."""
    found = evaluate_named_layouts(drawn, layouts).as_json() if layouts else advise(drawn).as_json()
    own = {
        "facts": drawn.profile.as_json(),
        "cluster": drawn.cluster.as_json(),
        "efficiency": drawn.efficiency.as_json(),
    }
    read: dict[str, Any] = json.loads(json.dumps({**found, **own}))
    return read


@pytest.mark.parametrize("seed", range(10))
def test_a_candidates_own_words_name_it(seed: int) -> None:
    drawn, grid = forecast(seed)
    for candidate in list(candidates(drawn.profile, drawn.cluster, grid))[::17]:
        found = estimate_named(drawn, candidate.layout, micro_batch_size=candidate.micro_batch_size)
        assert found == drawn.estimate(candidate)


def test_without_a_microbatch_the_quickest_that_fits_is_taken() -> None:
    drawn = made()
    found = estimate_named(drawn, "fsdp,remat=full")
    every = [estimate_named(drawn, "fsdp,remat=full", micro_batch_size=n) for n in (1, 2, 4, 8)]
    assert found.fits and found.step_seconds == min(one.step_seconds for one in every if one.fits)
    assert not all(one.fits for one in every)
    none = estimate_named(drawn, "ddp")
    assert not none.fits and none.candidate.micro_batch_size == 1


def test_named_layouts_are_judged_in_their_order_with_what_keeps_the_others_out() -> None:
    found = evaluate_named_layouts(made(), ["ddp", "fsdp,remat=full", "single", "tp=16", "ep=2,dp=8"])
    told = found.as_json()
    assert [row["layout"] for row in told["plans"]] == ["ddp", "fsdp,remat=full", "single", "tp=16", "ep=2,dp=8"]
    assert [row["fits"] for row in told["plans"]] == [False, True, False, False, False]
    assert told["recommended"] == "fsdp,remat=full" and told["plans"][0]["changes"]
    assert "tp=16 needs 16 ranks, you have 8" in found.missing["tp=16"]
    assert "ep" in found.missing["ep=2,dp=8"]
    first, second = told["differences"]
    assert first[0].startswith("ddp in microbatches of 1 -> fsdp,remat=full") and "remat none -> full" in first[1]
    assert "dp_replicate 8 -> 1" in second[1]
    text = "\n".join(found.lines())
    assert "GiB too much: " in text and "recommended, NOT REPLAYED (" in text


def test_what_a_plan_does_not_tell_apart_is_not_judged_as_another() -> None:
    found = evaluate_named_layouts(made(), ["fsdp,remat=every:2", "fsdp,remat=full"])
    assert [row["layout"] for row in found.as_json()["plans"]] == ["fsdp,remat=full", "fsdp,remat=every:2"]
    assert "does not forecast remat=every:2" in found.missing["fsdp,remat=every:2"]
    with pytest.raises(LayoutError, match="does not forecast remat=every:2") as caught:
        evaluate_named_layouts(made(), ["fsdp,remat=every:2"])
    assert caught.value.hint == "--layouts fsdp,remat=none fsdp,remat=full"


def test_what_was_timed_is_told_and_the_others_are_as_wrong() -> None:
    drawn, names = made(), ["fsdp,remat=full", "single"]
    own, other = (row.estimate for row in evaluate_named_layouts(drawn, names).rows)
    timed = replace(own, measured_time=MeasuredTime(seconds=3 * own.step_seconds, spread=0.1, steps=5, blocks=(2, 4)))
    first, second = evaluate_named_layouts(drawn, names, timed_estimates=[timed]).rows
    assert first.estimate.measured_time == timed.measured_time and second.estimate.measured_time is None
    assert first.estimate.step_seconds == pytest.approx(3 * own.step_seconds)
    assert second.estimate.step_seconds == pytest.approx(3 * other.step_seconds)
    assert "timed (± 10%)" in "\n".join(evaluate_named_layouts(drawn, names, timed_estimates=[timed]).lines())


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("threads", "replicas in one process"),
        ("tp=3,dp=1", "needs 3 ranks"),
        ("tp=8", "the model allows tp of 2, 4"),
        ("dp=8,remat=full,tp=1,cp=1,ep=8", "the model allows no ep"),
        ("pp=2,dp=4", "pp=2,dp_replicate=4 is not possible: no chain of blocks was found"),
        ("pp=8,schedule=interleaved,virtual=9", "72 stages can't be cut from 32 blocks"),
        ("fsp", "fsp"),
    ],
)
def test_a_layout_that_can_not_be_had_says_why(layout: str, said: str) -> None:
    drawn = made()
    refused = {"pp": "no chain of blocks was found"} if layout == "pp=2,dp=4" else {}
    drawn = CostModel(profile=replace(drawn.profile, tp_sizes=(2, 4), refused=refused), cluster=drawn.cluster)
    with pytest.raises(PacelineError) as refused:
        evaluate_named_layouts(drawn, [layout])
    assert said in str(refused.value)


def test_microbatches_and_replicas_that_can_not_be_are_refused() -> None:
    with pytest.raises(UsageError, match="micro_batch_size 9 is not between 1 and the 8 samples"):
        estimate_named(made(), "fsdp", micro_batch_size=9)
    with pytest.raises(LayoutError, match="8 replicas for a global batch of 4"):
        estimate_named(made(batch=4), "ddp")


def test_a_plan_in_a_file_is_what_it_was() -> None:
    drawn = made()
    told = answer(drawn)
    again = cost_model_from_json(told)
    assert (again.profile, again.cluster, again.efficiency) == (drawn.profile, drawn.cluster, drawn.efficiency)
    for row, own in zip(told["plans"], advise(drawn).rows, strict=True):
        found = estimate_from_row(again, row)
        assert found.candidate == own.estimate.candidate and found.seconds == own.estimate.seconds
        assert found.peak_bytes == pytest.approx(own.estimate.peak_bytes, abs=len(MEMORY_PARTS))
    assert find_row(told)["layout"] == told["recommended"]
    with pytest.raises(UsageError, match="the plan has no layout ddp,remat=no"):
        find_row(told, "ddp,remat=no")
    with pytest.raises(UsageError, match="does not state its model or its cluster"):
        cost_model_from_json({"plans": []})


def test_bytes_and_seconds_that_stand_in_the_file_are_taken() -> None:
    told = answer(made(), "fsdp,remat=full")
    row = told["plans"][0]
    row["parts"] = {"activations": 3 << 30, "total": 9 << 30}  # as a replay counted them
    row["seconds"]["compute"] = 100.0
    found = estimate_from_row(cost_model_from_json(told), row)
    assert found.peak_bytes == 3 << 30 and found.step_seconds > 100


def test_two_plans_are_told_apart() -> None:
    one, other = answer(made(), "fsdp,remat=full"), answer(made(), "zero2,remat=full")
    assert next(diff_plan_files(one, other)).startswith("fsdp,remat=full in microbatches of 2 -> zero2")
    lines = list(diff_plan_files(answer(made()), answer(made("16xH100-80G", batch=128))))
    assert lines[:2] == ["cluster: 8 × H100-80G -> 16 × H100-80G", "global batch: 64 -> 128"]
    assert lines[-2].startswith("step: ") and lines[-1].startswith("peak: ")
    assert [line for line in diff_plan_files(answer(made()), answer(made())) if "nothing" in line]


def test_the_page_shows_every_part_against_the_limit() -> None:
    told = answer(made(), "ddp", "fsdp,remat=full", "pp=2,dp_shard=4,remat=full,zero=1", "threads")
    html = plan_page(told, job="a <job>")
    assert "a &lt;job&gt;" in html and "<script" not in html and html.count("does not fit") == 1
    for part, value in told["plans"][0]["parts"].items():
        assert not value or f"<title>{part} {format_size(value)}</title>" in html
    assert len(re.findall(r'class="mark" d="M[\d.]+ [\d.]+V', html)) == 1 and "80.0 GiB</text>" in html
    assert html.count("<h2>A step of ") == 2 and "1f1b · 2 ranks" in html and "1f1b · 1 rank ·" in html
    assert "<h2>Differences from the first layout</h2>" in html and "<b>threads</b>" in html
    shapes = re.findall(r'<rect x="([\d.]+)" y="[\d.]+" width="([\d.]+)"[^>]*class="fill\d+"><title>(\w+) ', html)
    left = float(shapes[0][0])
    ends = [float(x) + float(wide) for x, wide, name in shapes if name == "reserve"]
    line = float(re.findall(r'class="mark" d="M([\d.]+)', html)[0])
    assert [end > line for end in ends] == [True, False, False]
    assert (line - left) / (ends[0] - left) == pytest.approx((80 << 30) / told["plans"][0]["peak_bytes"], rel=1e-3)


def test_a_picture_of_many_microbatches_is_one_of_few() -> None:
    html = plan_page(answer(made(batch=512), "pp=2,dp_shard=4,remat=full,zero=1"), job="x")
    assert "The picture shows 24 of its 128 microbatches." in html and html.count("<title>F") == 48
