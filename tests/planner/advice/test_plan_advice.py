"""What a plan prints: the case, the families, the changes, the differences and the errors."""

import json
from dataclasses import replace

import pytest

from paceline.errors import LayoutError
from paceline.planner.advice.layout_diff import layout_differences
from paceline.planner.advice.memory_case import find_memory_case
from paceline.planner.advice.recommendations import advise, build_plan_row
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.forecast_margins import is_tie
from paceline.planner.cost.layout_candidate import FAMILIES, Candidate
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.model_costs.model_profile import ModelProfile, OptimizerFootprint
from paceline.planner.search.branch_and_bound import search, sort_key
from paceline.planner.search.layout_simplicity import simplicity_key
from paceline.planner.search.neighbors import cheapest_changes
from paceline.planner.search.search_space import SearchSpace
from tests.planner.random_plans import forecast
from tests.work_count import count_calls

SMALL = Decoder(layers=4, width=256, mlp_width=1024, heads=4, vocabulary=1000)
LLAMA_8B = Decoder(layers=32, width=4096, mlp_width=14336, heads=32, kv_heads=8, vocabulary=128256)
LLAMA_405B = Decoder(layers=126, width=16384, mlp_width=53248, heads=128, kv_heads=8, vocabulary=128256)


def facts_of(sizes: Decoder, *, length: int = 8192, batch: int = 64) -> ModelProfile:
    return build_decoder_profile(sizes, name="the model", length=length, global_batch_size=batch)


def made(sizes: Decoder, cluster: str, *, length: int = 8192, batch: int = 64) -> CostModel:
    return CostModel(profile=facts_of(sizes, length=length, batch=batch), cluster=parse_cluster(cluster))


@pytest.mark.parametrize(
    ("sizes", "cluster", "length", "case", "says"),
    [
        (SMALL, "8xH100-80G", 512, 1, "fit on one device"),
        (LLAMA_8B, "8xH100-80G", 8192, 2, "Every layer fits"),
        (LLAMA_405B, "128x8xH100-80G", 8192, 2, "do not fit on one device"),
        (LLAMA_405B, "1024xRTX-4090", 8192, 3, "tensors must be split"),
        (LLAMA_8B, "8xH100-80G", 1 << 20, 3, "tensors must be split"),
    ],
)
def test_the_three_cases(sizes: Decoder, cluster: str, length: int, case: int, says: str) -> None:
    found = find_memory_case(made(sizes, cluster, length=length))
    assert found.number == case and says in found.description


@pytest.mark.parametrize("seed", range(20))
def test_advice_is_what_was_found(seed: int) -> None:
    drawn, grid = forecast(seed)
    best = search(drawn, grid=grid).best
    if not best:
        with pytest.raises(LayoutError, match=r"no layout|no layout of|there is no") as caught:
            advise(drawn, grid=grid)
        assert caught.value.hint
        return
    advice = advise(drawn, grid=grid)
    shown = {row.family: row.estimate for row in advice.rows if row.estimate.fits}
    own = advice.recommended.candidate.family
    assert shown == {**best, own: advice.recommended}
    quickest = min(best.values(), key=sort_key)
    assert advice.recommended.fits and is_tie(advice.recommended, quickest)
    assert simplicity_key(advice.recommended.candidate) <= min(
        simplicity_key(one.candidate) for one in best.values() if is_tie(one, quickest)
    )
    assert (advice.tie is None) == (advice.recommended.step_seconds == quickest.step_seconds)
    assert ("a tie" in advice.rows[0].explanation) == (advice.tie is not None)
    assert len({row.family for row in advice.rows}) == len(advice.rows)
    assert {row.family for row in advice.rows} <= set(FAMILIES)
    assert all(row.explanation for row in advice.rows)
    for row in advice.rows:
        for change in row.changes:
            assert not row.estimate.fits and change.estimate.fits
            assert change.seconds == pytest.approx(change.estimate.step_seconds - row.estimate.step_seconds)
    text = "\n".join(advice.lines())
    assert f"case {advice.case.number}" in text and f"--layout {advice.recommended.layout}" in text


def test_json_has_its_fixed_keys_and_reads_back() -> None:
    advice = advise(made(LLAMA_8B, "8xH100-80G"))
    answer = advice.as_json()
    assert set(answer) == {"case", "recommended", "replayed", "unreplayed", "tie", "plans", "limits"}
    assert not answer["replayed"] and "analytical only" in answer["unreplayed"]
    assert json.loads(json.dumps(answer)) == answer
    assert answer["case"] == 2 and answer["recommended"] == answer["plans"][0]["layout"]
    for plan in answer["plans"]:
        assert {"layout", "fits", "peak_bytes", "parts", "step_seconds", "why"} <= set(plan)
        assert abs(sum(plan["parts"].values()) - plan["peak_bytes"]) <= len(plan["parts"])
        assert sum(plan["seconds"].values()) == pytest.approx(plan["step_seconds"])
    assert [plan["fits"] for plan in answer["plans"]] == sorted((p["fits"] for p in answer["plans"]), reverse=True)


def test_of_layouts_that_cannot_be_told_apart_the_simplest() -> None:
    advice = advise(CostModel(profile=facts_of(SMALL, length=64, batch=32), cluster=parse_cluster("2xcpu")))
    assert advice.case.number == 1 and advice.recommended.layout == "ddp"


def test_one_device_has_no_other_family() -> None:
    advice = advise(made(SMALL, "H100-80G", length=512))
    assert [row.family for row in advice.rows] == ["single"] and advice.recommended.layout == "single"


def test_what_does_not_fit_says_by_how_much_and_what_would_change_it() -> None:
    forecasts = made(LLAMA_8B, "8xH100-80G")
    asked = forecasts.estimate(Candidate(dp_replicate=8, micro_batch_size=1, precision="bf16"))
    row = build_plan_row(forecasts, asked)
    assert not asked.fits and " too much: " in row.explanation and 1 <= len(row.changes) <= 3
    assert all(change.estimate.fits and "dp" in str(change) and " GiB, " in str(change) for change in row.changes)
    times = [change.seconds for change in row.changes]
    assert times == sorted(times)
    assert build_plan_row(forecasts, row.changes[0].estimate).changes == ()


def test_one_change_is_enough_where_one_is() -> None:
    forecasts = made(LLAMA_8B, "8xH100-80G")
    asked = forecasts.estimate(Candidate(dp_shard=8, zero=3, micro_batch_size=8, precision="bf16"))
    assert not asked.fits
    found = cheapest_changes(forecasts, asked, grid=SearchSpace())
    assert (
        any(
            change.description == "micro_batch_size 8 -> 1" or change.description.startswith("remat")
            for change in found
        )
        or found
    )


def test_no_layout_fits_is_an_error_of_our_own() -> None:
    with pytest.raises(LayoutError) as caught:
        advise(made(LLAMA_405B, "8xH100-80G"))
    said = str(caught.value)
    assert "no layout of the model fits on 8 × H100-80G." in said
    assert "the nearest is " in said and "--cluster " in said and len(said.splitlines()) == 3


def test_where_nothing_larger_helps_it_says_so() -> None:
    forecasts = made(LLAMA_405B, "2xT4", length=1 << 20, batch=2)
    with pytest.raises(LayoutError) as caught:
        advise(forecasts, grid=SearchSpace(pp=(1,), remat=("none",), sequence=(False,)))
    assert "shorter samples" in str(caught.value)


def test_more_ranks_than_samples() -> None:
    facts = replace(facts_of(SMALL, batch=2), tp_sizes=(), cp_sizes=(), refused={"pp": "it has no chain"})
    with pytest.raises(LayoutError, match="there is no layout of the model on 8 × T4") as caught:
        advise(CostModel(profile=facts, cluster=parse_cluster("8xT4")))
    assert "a global batch of 8 or more" in str(caught.value)
    with pytest.raises(LayoutError, match="there is no layout of the model on 8 × T4"):
        advise(CostModel(profile=replace(facts, name=""), cluster=parse_cluster("8xT4")))


def test_families_that_the_model_or_the_optimizer_refuses_say_why() -> None:
    facts = replace(
        facts_of(SMALL, length=512), optimizer=OptimizerFootprint(name="Muon", state_bytes=4.0, whole_tensors=True),
        refused={"pp": "a skip over every border"},
    )  # fmt: skip
    missing = "\n".join(advise(CostModel(profile=facts, cluster=parse_cluster("8xA100-80G"))).missing)
    assert "pp: a skip over every border" in missing and "fsdp: Muon needs whole tensors" in missing


def test_memory_is_named_where_it_keeps_out_what_is_quicker() -> None:
    advice = advise(made(LLAMA_8B, "8xH100-80G"))
    assert advice.limits[0].startswith("limited by ")
    assert any("by memory: with " in line for line in advice.limits)
    assert len(advise(made(SMALL, "8xH100-80G", length=512)).limits) == 1


def test_after_a_run_without_memory_the_next_plan_needs_less() -> None:
    forecasts = made(LLAMA_8B, "8xH100-80G")
    first = advise(forecasts).recommended
    second = advise(forecasts.with_memory_limit(0.9 * first.peak_bytes)).recommended
    assert second.peak_bytes <= 0.9 * first.peak_bytes and second.step_seconds >= first.step_seconds
    assert forecasts.with_memory_limit(1e15).cluster == forecasts.cluster
    rows = advise(forecasts.with_memory_limit(0.9 * first.peak_bytes).with_memory_limit(0.8 * first.peak_bytes)).rows
    assert all(" of 80.0 GiB are left" in row.explanation for row in rows if row.fits)
    assert rows[0].fits and "80.0 GiB" in rows[0].explanation


def test_differences_name_what_changed_and_what_it_did() -> None:
    forecasts = made(LLAMA_8B, "8xH100-80G")
    one = forecasts.estimate(Candidate(dp_shard=8, zero=3, remat="none", precision="bf16"))
    other = forecasts.estimate(Candidate(dp_shard=8, zero=3, remat="full", precision="bf16"))
    lines = layout_differences(one, other)
    assert lines[1] == "changed: remat none -> full"
    assert lines[2].startswith("step: ") and "again +" in lines[2]
    assert lines[3].startswith("peak: ") and "activations -" in lines[3]
    assert layout_differences(one, one)[1] == "changed: nothing" and "(+0.0%)" in layout_differences(one, one)[2]


def test_a_plan_of_thousands_of_ranks_is_quick() -> None:
    found, calls = count_calls(lambda: search(made(LLAMA_405B, "2048x8xH100-80G", batch=2048)))
    assert found.fastest is not None and found.fastest.candidate.ranks == 16384
    assert found.num_estimates < 5000 and calls < 6_000_000  # the seconds: benchmarks/search.py
