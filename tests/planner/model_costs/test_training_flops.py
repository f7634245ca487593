"""MFU: a model's FLOP count against published figures, and what does not count."""

from dataclasses import replace

import pytest

from paceline.planner.advice.recommendations import advise
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.step_time import StepTime
from paceline.planner.hardware.assumed_rates import assumption_lines, assumptions
from paceline.planner.hardware.catalog import DEVICES, sheet_rates
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.model_costs.model_profile import BatchScaling, LayerProfile, ModelProfile, OptimizerFootprint
from paceline.planner.model_costs.training_flops import model_flops

LLAMA_3 = {
    "8B": Decoder(layers=32, width=4096, mlp_width=14336, heads=32, kv_heads=8, vocabulary=128256),
    "70B": Decoder(layers=80, width=8192, mlp_width=28672, heads=64, kv_heads=8, vocabulary=128256),
}
SMALL = Decoder(layers=2, width=64, mlp_width=256, heads=4, vocabulary=1000)


def on(cluster: str, sizes: Decoder, *, length: int, batch: int) -> CostModel:
    facts = build_decoder_profile(sizes, name="x", length=length, global_batch_size=batch)
    return CostModel(profile=facts, cluster=parse_cluster(cluster))


def lasting(estimate: Estimate, seconds: float) -> Estimate:
    return replace(estimate, seconds=StepTime(compute=seconds))


@pytest.mark.parametrize(("size", "rate", "mfu"), [("8B", 2904, 0.568), ("8B", 2973, 0.582), ("70B", 331, 0.517)])
def test_mfu_is_the_one_that_was_published(size: str, rate: float, mfu: float) -> None:
    """torchtitan, docs/performance.md of 2024: 64 A100, a batch of 64 × 8,192 tokens, with activations run again."""
    forecast = on("8x8xA100-80G", LLAMA_3[size], length=8192, batch=64)
    candidate = Candidate(dp_shard=64, zero=3, remat="full", precision="bf16")
    found = lasting(forecast.estimate(candidate), 64 * 8192 / 64 / rate)
    assert found.tokens_per_second_per_device == pytest.approx(rate)
    assert found.samples_per_second_per_device == pytest.approx(rate / 8192)
    assert found.mfu == pytest.approx(mfu, abs=0.0006)  # its last printed digit


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_token_costs_six_operations_a_parameter_and_attention_over_all_pairs(is_tied: bool) -> None:
    facts = build_decoder_profile(replace(SMALL, is_tied=is_tied), name="x", length=16, global_batch_size=3)
    norms = 2 * (2 * 64) + 64
    expected = 6 * (facts.parameters - norms) + 12 * 2 * 64 * 16
    assert model_flops(facts) == 3 * 16 * expected


def test_masked_pairs_count_however_attention_is_written() -> None:
    fused, plain = (
        build_decoder_profile(SMALL, name="x", length=16, global_batch_size=3, is_flash=on) for on in (True, False)
    )
    assert model_flops(fused) == model_flops(plain)
    assert fused.blocks[0].attention_flops != plain.blocks[0].attention_flops


def test_weights_that_are_not_trained_have_no_products_of_their_own() -> None:
    part = LayerProfile(name="b", split_parameters=100, matmul_flops=BatchScaling(sample=200.0))
    facts = ModelProfile(
        name="x", first=LayerProfile(name="f"), blocks=(part,), last=LayerProfile(name="l"), global_batch_size=5,
        optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0),
    )  # fmt: skip
    assert model_flops(facts) == 5 * 3 * 200
    assert model_flops(replace(facts, blocks=(replace(part, frozen_parameters=100),))) == 5 * 2 * 200
    assert model_flops(replace(facts, blocks=(replace(part, frozen_parameters=25),))) == 5 * 2.75 * 200


def test_a_table_counts_in_a_model_of_sequences_alone() -> None:
    """A recommender reads a few rows of large tables: they are no products."""
    facts = ModelProfile(
        name="x", first=LayerProfile(name="f", whole_parameters=10**6, lookup_parameters=10**6), blocks=(),
        last=LayerProfile(name="l", matmul_flops=BatchScaling(sample=50.0)), optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0),
        global_batch_size=4,
    )  # fmt: skip
    assert model_flops(facts) == 3 * 4 * 50
    assert model_flops(replace(facts, length=2)) == 3 * 4 * 50 + 6 * 10**6 * 4 * 2


def test_recomputation_and_the_layout_change_the_time_and_not_the_operations() -> None:
    forecast = on("8xH100-80G", SMALL, length=1024, batch=64)
    plain, again, split = (
        forecast.estimate(Candidate(dp_replicate=8 // tp, tp=tp, remat=remat, precision="bf16"))
        for tp, remat in ((1, "none"), (1, "full"), (2, "none"))
    )
    assert plain.model_flops == again.model_flops == split.model_flops
    assert again.mfu < plain.mfu
    each = plain.tokens_per_second_per_device
    assert each is not None and plain.mfu == pytest.approx(each * plain.model_flops / (64 * 1024) / 989.5e12)


def test_the_peak_is_that_of_the_number_format() -> None:
    forecast = on("8xH100-80G", SMALL, length=64, batch=64)
    short, wide = (forecast.estimate(Candidate(dp_replicate=8, precision=name)) for name in ("bf16", "fp32"))
    assert (short.peak_flops_per_second, wide.peak_flops_per_second) == (989.5e12, 67e12)
    old = on("8xV100-32G", SMALL, length=64, batch=64).estimate(Candidate(dp_replicate=8, precision="bf16"))
    assert old.peak_flops_per_second == 15.7e12  # it has no bf16


def test_a_measured_gpu_is_held_against_its_sheet() -> None:
    sheet = sheet_rates("NVIDIA H100 80GB HBM3")
    assert sheet == DEVICES["H100-80G"].device.flops_per_second and sheet_rates("Radeon") == {}
    fleet = parse_cluster("8xH100-80G")
    measured = replace(fleet.device, flops_per_second={"fp32": 50e12, "bf16": 700e12}, source="measured here")
    assert measured.peak("bf16") == 700e12 and replace(measured, peaks=sheet).peak("bf16") == 989.5e12
    lines = "\n".join(assumption_lines(replace(fleet, device=measured), precision="bf16"))
    assert "MFU: of 700 TFLOP/s of each GPU, dense bf16 (measured here)" in lines


def test_a_table_has_the_rate_and_mfu_of_each_layout() -> None:
    advice = advise(on("8xH100-80G", LLAMA_3["8B"], length=8192, batch=64))
    lines = list(advice.lines())
    title = next(line for line in lines if line.startswith("  layout"))
    assert title.split("  ")[-1] == "MFU" and "  tokens/s per GPU  " in title
    best, told = advice.recommended, advice.as_json()["plans"][0]
    row = next(line for line in lines if line.startswith(f"  {best.candidate} "))
    tokens = best.tokens_per_second_per_device
    assert tokens is not None and f"  {tokens:,.0f} " in row and row.endswith(f"  {best.mfu:.1%}")
    assert row.index(f"{best.mfu:.1%}") == title.index("MFU") and row.index(f"{tokens:,.0f}") == title.index("tokens/s")
    assert told["mfu"] == best.mfu and told["tokens_per_second_per_device"] == tokens
    assert told["samples_per_second_per_device"] == best.samples_per_second_per_device
    assert told["mfu"] == pytest.approx(tokens * best.model_flops / (64 * 8192) / 989.5e12)


def test_without_a_length_it_is_samples() -> None:
    part = LayerProfile(name="b", split_parameters=100, matmul_flops=BatchScaling(sample=1e9))
    facts = ModelProfile(
        name="x", first=LayerProfile(name="f"), blocks=(part,), last=LayerProfile(name="l"), global_batch_size=8,
        optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0),
    )  # fmt: skip
    advice = advise(CostModel(profile=facts, cluster=parse_cluster("2xcpu")))
    assert "  samples/s per rank  " in "\n".join(advice.lines())
    assert advice.as_json()["plans"][0]["tokens_per_second_per_device"] is None


@pytest.mark.parametrize(
    ("cluster", "inside", "between"),
    [
        ("2x8xH100-80G", "nvlink4, 450 GB/s each way, latency 3 us (assumed: ", "ib-ndr, 50 GB/s each way, latency 6 us (assumed: "),
        ("2x8xH100-80G@eth-100g", "nvlink4, ", "eth-100g, 12.5 GB/s each way shared by all ranks of a node, latency 25 us (given: "),
        ("8xL4", "pcie4, 31.5 GB/s each way, latency 8 us (assumed: ", None),
        ("L4", None, None),
    ],
)  # fmt: skip
def test_links_are_told_with_how_they_are_known(cluster: str, inside: str | None, between: str | None) -> None:
    fleet = parse_cluster(cluster)
    lines = "\n".join(assumption_lines(fleet, precision="bf16"))
    links = assumptions(fleet, precision="bf16")["links"]
    for name, said in (("inside a node", inside), ("between nodes", between)):
        assert (f"link {name}: {said}" in lines) if said else (f"link {name}" not in lines and name not in links)
    if between:
        assert links["between nodes"]["origin"] == ("given" if "@" in cluster else "assumed")
        assert links["between nodes"]["bytes_per_second"] == fleet.between.bytes_per_second
    assert "link to the host" not in lines
    assert "link to the host: " in "\n".join(assumption_lines(fleet, precision="bf16", is_offloaded=True))
