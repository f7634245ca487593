"""Options that change numbers are searched and labelled but never recommended; the cost of compiled blocks by hand."""

from dataclasses import replace

import pytest

from paceline.planner.advice.numeric_options import find_numerics_options, option_lines, with_compiled_blocks
from paceline.planner.advice.recommendations import advise
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.model_costs.model_profile import BatchScaling
from paceline.planner.search.branch_and_bound import search, search_exhaustively, sort_key
from paceline.planner.search.evaluate_named_layout import estimate_named
from paceline.planner.search.search_space import SearchSpace
from tests.planner.cost.test_forecast_by_hand import BLOCK, FACTS, FLEET, made

LLAMA_8B = Decoder(layers=32, width=4096, mlp_width=14336, heads=32, kv_heads=8, vocabulary=128256)
FEW = SearchSpace(schedules=("1f1b",), virtual=(), offload=((),), micro_batch_size=1)


def llama(cluster: str, *, precision: str = "bf16", batch: int = 64) -> CostModel:
    facts = build_decoder_profile(LLAMA_8B, name="8B", length=8192, global_batch_size=batch, precision=precision)
    return CostModel(profile=facts, cluster=parse_cluster(cluster))


def test_options_are_the_best_of_all_that_fit_and_no_row_has_them() -> None:
    forecast = llama("8xH100-80G")
    advice = advise(forecast, grid=FEW)
    short, joined = find_numerics_options(forecast, advice.recommended, FEW)
    assert not any(row.estimate.candidate.params == "bf16" or row.estimate.candidate.compiles for row in advice.rows)
    every = search_exhaustively(forecast, grid=replace(FEW, zero=(3,), params=("bf16",))).best.values()
    assert short.estimate == min((one for one in every if one.candidate.params == "bf16"), key=sort_key)
    every = search_exhaustively(forecast.with_profile(with_compiled_blocks(forecast.profile)), grid=FEW).best.values()
    assert joined.estimate == min(every, key=sort_key) and joined.estimate.candidate.compiles
    assert short.estimate.fits and joined.estimate.fits
    assert short.recommended_seconds == joined.recommended_seconds == advice.recommended.step_seconds


def test_an_option_has_what_it_is_called_by_where_others_are_quicker() -> None:
    """Over Ethernet a pipeline without shards is quickest, which has no weights to gather."""
    forecast = llama("2x8xA100-80G@eth-100g")
    best = advise(forecast, grid=FEW).recommended
    short = find_numerics_options(forecast, best, FEW)[0]
    assert short.estimate.candidate.params == "bf16" and short.estimate.step_seconds > best.step_seconds
    assert "params=bf16" in short.command and " times as long as " in "".join(short.lines())


def test_an_option_says_what_to_type_what_it_gains_and_what_becomes_of_the_numbers() -> None:
    forecast = llama("8xH100-80G")
    best = advise(forecast, grid=FEW).recommended
    options = find_numerics_options(forecast, best, FEW)
    title, *lines = option_lines(options)
    assert title == "not recommended, because they change the numbers; use them if you accept that:"
    for option, typed, said in zip(options, lines[::2], lines[1::2], strict=True):
        assert typed == f"  with {option.option}: {option.command}"
        ratio = best.step_seconds / option.estimate.step_seconds
        speed = f"{ratio:.2f} times as fast as" if ratio > 1 else f"{1 / ratio:.2f} times as long as"
        assert f" (forecast): {speed} the recommended one; " in said
        assert said.endswith(option.numeric_effect) and f"MFU {option.estimate.mfu:.1%}" in said
        told = option.as_json()
        assert told["option"] == option.option and told["recommended_step_seconds"] == best.step_seconds
        assert told["step_seconds"] == option.estimate.step_seconds and told["mfu"] == option.estimate.mfu
    assert any(best.step_seconds > option.estimate.step_seconds for option in options)
    assert "params=bf16" in options[0].command and " --train.compile true" in options[1].command
    slower = [replace(option, recommended_seconds=0.5 * option.estimate.step_seconds) for option in options]
    assert ": 2.00 times as long as the recommended one; " in "\n".join(option_lines(slower))
    assert list(option_lines([])) == []


def test_weights_in_bfloat16_are_no_option_where_products_of_them_are_slower() -> None:
    forecast = llama("8xV100-32G", precision="fp16", batch=8)
    found = find_numerics_options(forecast, search(forecast, grid=FEW).best["mixed"], FEW)
    assert [option.option for option in found] == ["--train.compile true"]


def test_who_compiles_already_is_told_so_in_every_row() -> None:
    forecast = llama("8xH100-80G")
    forecast = forecast.with_profile(with_compiled_blocks(forecast.profile))
    advice = advise(forecast, grid=FEW)
    assert all(row.estimate.settings["train.compile"] == "true" for row in advice.rows)
    assert " --train.compile true" in "\n".join(advice.lines())
    for row in advice.rows:
        candidate = row.estimate.candidate
        assert candidate.tp == 1 and candidate.remat != "selective" and str(candidate).endswith(", compiled")
    assert "tp: torch.compile does not support" in "\n".join(advice.missing)
    assert [option.option for option in find_numerics_options(forecast, advice.recommended, FEW)] == ["params=bf16"]
    assert estimate_named(forecast, "fsdp,remat=full").candidate.compiles


def test_compiled_blocks_move_what_is_left_of_their_bytes() -> None:
    """Of 1 s for what is no product a quarter is left: forward 1 + 2 + 0.25 s, backward 2 + 2.5 × 2 + 2 × 0.25 s."""
    block = replace(BLOCK, fused_bytes=BatchScaling(sample=0.25e9))
    facts = replace(FACTS, blocks=(block,) * 4)
    alone = replace(FLEET, devices=1)
    candidate = Candidate(micro_batch_size=2, compiles=True)
    assert made(with_compiled_blocks(facts), alone).seconds(candidate).compute == 4 * 4 * (3.25 + 7.5)
    assert made(facts, alone).seconds(candidate).compute == 4 * 4 * (4.0 + 9.0)
    assert made(with_compiled_blocks(FACTS), alone).seconds(candidate).compute == 4 * 4 * (4.0 + 9.0)  # it is not known
    end = replace(block, name="end")
    ends = replace(facts, first=end)  # what is no block is not compiled
    assert made(with_compiled_blocks(ends), alone).seconds(candidate).compute == 4 * 4 * (3.25 + 7.5) + 4 * (4.0 + 9.0)
    whole = replace(facts, blocks=(), first=end)  # but where there is none the model is
    assert made(with_compiled_blocks(whole), alone).seconds(candidate).compute == 4 * (3.25 + 7.5)


@pytest.mark.parametrize("cluster", ["8xH100-80G", "2x8xA100-80G"])
def test_a_model_whose_operations_were_not_seen_has_no_option_to_compile(cluster: str) -> None:
    forecast = llama(cluster)
    blocks = tuple(replace(block, fused_bytes=BatchScaling()) for block in forecast.profile.blocks)
    forecast = forecast.with_profile(replace(forecast.profile, blocks=blocks))
    best = search(forecast, grid=FEW).fastest
    assert best is not None
    assert [option.option for option in find_numerics_options(forecast, best, FEW)] == ["params=bf16"]
