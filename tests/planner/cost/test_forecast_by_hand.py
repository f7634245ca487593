"""Forecasts whose every number is computed here by hand."""

from dataclasses import replace

import pytest

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.hardware.cluster import Cluster, Device, Link
from paceline.planner.hardware.efficiency import Efficiency
from paceline.planner.model_costs.model_profile import BatchScaling, LayerProfile, ModelProfile, OptimizerFootprint
from paceline.planner.search.branch_and_bound import search
from paceline.planner.search.search_space import SearchSpace, candidates

MIB = 1 << 20
ALL = Efficiency(
    matmul=1.0, attention=1.0, memory=1.0, link=1.0, overlap=0.0, host=0.5, part_seconds=0.0, unit_seconds=0.0,
    step_seconds=0.0, slack=0.0,
)  # fmt: skip
LINK = Link(name="link", latency_seconds=0.0, bytes_per_second=100.0)
FLEET = Cluster(
    device=Device(name="d", memory_bytes=1e9, flops_per_second={"fp32": 1000.0}, bytes_per_second=1e9, reserve_bytes=7.0),
    devices=2, inside=LINK, between=LINK, host=replace(LINK, bytes_per_second=50.0),
)  # fmt: skip
END = LayerProfile(name="end")
BLOCK = LayerProfile(
    name="block", split_parameters=100, matmul_flops=BatchScaling(sample=1000.0), attention_flops=BatchScaling(sample=2000.0),
    moved_bytes=BatchScaling(sample=1e9), split_saved_bytes=BatchScaling(sample=64.0), selective_saved_bytes=BatchScaling(sample=24.0),
    output_bytes=BatchScaling(sample=16.0), peak_bytes=BatchScaling(sample=10.0), tp_bytes=BatchScaling(sample=200.0), tp_calls=1,
    large_parameters=100,
)  # fmt: skip
FACTS = ModelProfile(
    name="by hand", first=END, blocks=(BLOCK,) * 4, last=END, optimizer=OptimizerFootprint(name="Adam", state_bytes=8.0, moment_bytes=4.0),
    global_batch_size=4, tp_sizes=(2,),
)  # fmt: skip
FORWARD, BACK = 1.0 + 2.0 + 1.0, 2.0 + 2.5 * 2.0 + 2.0  # products, attention, the rest
UPDATE = 400 * (3 * 4 + 2 * 8) / 1e9


def made(facts: ModelProfile = FACTS, fleet: Cluster = FLEET, efficiency: Efficiency = ALL) -> CostModel:
    return CostModel(profile=facts, cluster=fleet, efficiency=efficiency)


def test_one_device() -> None:
    forecast = made(fleet=replace(FLEET, devices=1))
    seconds = forecast.seconds(Candidate(micro_batch_size=2))
    assert seconds.compute == 4 * 4 * (FORWARD + BACK) and seconds.update == pytest.approx(UPDATE)
    assert seconds.step_seconds == pytest.approx(seconds.compute + UPDATE)
    memory = forecast.memory(Candidate(micro_batch_size=2))
    assert memory.parts == {
        "parameters": 1600, "gradients": 1600, "optimizer": 3200, "master": 0, "activations": 0, "gathered": 0,
        "buffers": 0, "temporaries": 1600, "slack": 0, "reserve": 7,
    }  # fmt: skip
    working = made(replace(FACTS, optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0))).memory(
        Candidate(micro_batch_size=2)
    )
    assert (working.activations, working.temporaries) == (4 * 2 * 64, 20)


def test_the_ranks_of_zbv_have_the_first_stage_and_the_last() -> None:
    """Of stages 0 and 3, with an end of 3 s a sample each, and 1 and 2: a loop would give each rank one end."""
    end = LayerProfile(name="end", split_parameters=100, matmul_flops=BatchScaling(sample=1000.0))
    forecast = made(replace(FACTS, first=end, last=end, tp_sizes=()))
    found = forecast.seconds(Candidate(pp=2, schedule="zbv", virtual=2, micro_batch_size=1))
    assert found.compute == 4 * 2 * (FORWARD + BACK + 3.0)


def test_slack_and_the_start_are_beside_it() -> None:
    forecast = made(efficiency=replace(ALL, slack=0.5, part_seconds=0.25, step_seconds=3.0))
    memory = forecast.memory(Candidate(dp_replicate=2, micro_batch_size=2))
    assert memory.slack == 0.5 * memory.temporaries
    seconds = forecast.seconds(Candidate(dp_replicate=2, micro_batch_size=2))
    assert seconds.compute == 2 * 4 * (FORWARD + BACK) + 4 * 2 * 0.25 + 2 * 2 * 0.25  # the ends are parts too
    assert seconds.start == 3.0


def test_running_again() -> None:
    forecast = made(replace(FACTS, optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0)))
    for remat, kept, again in (("selective", 16 + 24, 1.0), ("full", 16, FORWARD)):
        candidate = Candidate(dp_replicate=2, micro_batch_size=1, remat=remat)
        assert forecast.memory(candidate).activations == 4 * kept + (64 - kept)
        assert forecast.seconds(candidate).again == 2 * 4 * again


def test_few_rows_take_as_long_as_reading_the_weights() -> None:
    slow = replace(FLEET, devices=1, device=replace(FLEET.device, bytes_per_second=100.0))
    facts = replace(FACTS, blocks=(replace(BLOCK, moved_bytes=BatchScaling(), attention_flops=BatchScaling()),))
    assert made(facts, slow).seconds(Candidate(micro_batch_size=1)).compute == 4 * 3 * (100 * 4 / 100.0)


@pytest.mark.parametrize(
    ("candidate", "gather", "gradients", "update"),
    [
        (Candidate(dp_replicate=2), 0, 2 * 0.5 * 1600 / 100, UPDATE),
        (Candidate(dp_shard=2, zero=1), 0, 2 * 0.5 * 1600 / 100 + 0.5 * 1600 / 100, UPDATE / 2),
        (Candidate(dp_shard=2, zero=2), 2 * 0.5 * 1600 / 100, 0.5 * 1600 / 100, UPDATE / 2),
        (Candidate(dp_shard=2, zero=3), 2 * 3 * 0.5 * 1600 / 100, 0, UPDATE / 2),
        (Candidate(dp_shard=2, zero=3, params="bf16"), 2 * (2 * 0.5 * 800 / 100 + 0.5 * 1600 / 100), 0, UPDATE / 2),
    ],
)
def test_data_parallelism_that_hides_nothing(
    candidate: Candidate, gather: float, gradients: float, update: float
) -> None:
    seconds = made().seconds(candidate)
    assert seconds.compute == 2 * 4 * (FORWARD + BACK)
    assert (seconds.gather, seconds.gradients, seconds.update) == pytest.approx((gather, gradients, update))


def test_data_parallelism_that_hides_all_but_its_ends() -> None:
    hidden = made(efficiency=replace(ALL, overlap=1.0))
    block = 0.5 * 400 / 100
    assert hidden.seconds(Candidate(dp_replicate=2)).gradients == pytest.approx(2 * block)
    assert hidden.seconds(Candidate(dp_shard=2, zero=3)).gather == pytest.approx(2 * 3 * block)
    assert hidden.seconds(Candidate(dp_shard=2, zero=2)).gather == pytest.approx(2 * block)


def test_what_is_in_no_unit_is_gathered_before_all_and_summed_after_all() -> None:
    facts = replace(FACTS, first=replace(END, split_parameters=1000), last=replace(END, split_parameters=500))
    hidden = made(facts, efficiency=replace(ALL, overlap=1.0))
    root, first, block = (0.5 * 4 * n / 100 for n in (1500, 1000, 100))
    assert hidden.seconds(Candidate(dp_shard=2, zero=3)).gather == pytest.approx(2 * (root + block + block + first))
    assert hidden.seconds(Candidate(dp_shard=2, zero=2)).gather == pytest.approx(2 * first)
    assert hidden.seconds(Candidate(dp_replicate=2)).gradients == pytest.approx(2 * first)


def test_a_model_without_a_chain() -> None:
    facts = replace(FACTS, first=replace(BLOCK, name="all of it"), blocks=(), last=END)
    forecast = made(facts, efficiency=replace(ALL, overlap=1.0))
    whole = 0.5 * 400 / 100
    assert forecast.seconds(Candidate(dp_shard=2, zero=3)).gather == pytest.approx(2 * (whole + whole))
    every = list(candidates(facts, FLEET, SearchSpace()))
    assert {one.family for one in every} == {"ddp", "zero1", "zero2", "fsdp", "tp"}
    assert {one.remat for one in every} == {"none"} and {one.pp for one in every} == {1}
    assert search(made(facts)).fastest is not None


def test_tensor_parallelism() -> None:
    seconds = made().seconds(Candidate(tp=2, micro_batch_size=4))
    assert seconds.compute == 4 * 4 * (FORWARD + BACK) / 2
    assert seconds.tensor == pytest.approx(2 * 4 * (2 * 0.5 * 4 * 200 / 100))
    again = made().seconds(Candidate(tp=2, micro_batch_size=4, remat="full"))
    assert again.tensor == pytest.approx(1.5 * seconds.tensor)
    memory = made(replace(FACTS, optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0))).memory(
        Candidate(tp=2, micro_batch_size=2)
    )
    assert (memory.parameters, memory.activations, memory.temporaries) == (800, 4 * 2 * 32, 10)


def test_a_pipeline() -> None:
    seconds = made().seconds(Candidate(pp=2, micro_batch_size=1))
    stage, hop = 2 * (FORWARD + BACK), 16 / 100
    assert seconds.compute == 4 * stage
    assert seconds.bubble == pytest.approx(stage + 2 * hop + 3 * hop)
    memory = made(replace(FACTS, optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0))).memory(Candidate(pp=2))
    assert (memory.parameters, memory.activations, memory.buffers) == (800, 2 * 2 * 64, 2 * 16)


def test_the_fullest_of_a_ranks_stages_counts_for_all() -> None:
    facts = replace(FACTS, blocks=(BLOCK,) * 5, optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0))
    candidate = Candidate(pp=2, schedule="interleaved", virtual=2)
    assert made(facts).estimate(candidate).stages == (1, 1, 1, 2)
    memory = made(facts).memory(candidate)
    assert memory.parameters == 4 * 300
    assert memory.activations == (1 + 2 + 2) * 64 + 3 * 16  # of the second rank's: the larger stage twice, three inputs


def test_of_ranks_with_equal_stages_the_first_is_looked_at() -> None:
    facts = replace(FACTS, blocks=(BLOCK,) * 8)
    forecast = made(facts, replace(FLEET, devices=4))
    candidate = Candidate(pp=4)
    assert [rank for rank, _ in forecast.distinct_ranks(candidate)] == [0, 1, 3]
    assert [alive.num_held for alive in forecast.activation_peaks(candidate)] == [4, 3, 1]


def test_the_host() -> None:
    seconds = made().seconds(Candidate(dp_shard=2, zero=1, offload=("optimizer",)))
    assert seconds.offload == pytest.approx(2 * 1600 / 50)
    both = made().seconds(Candidate(dp_shard=2, zero=3, offload=("optimizer", "parameters")))
    assert both.offload == pytest.approx((800 + 800) / 50) and both.update == pytest.approx(5600 / 25)
    plain = made().seconds(Candidate(dp_shard=2, zero=3))
    assert both.gather - plain.gather == pytest.approx(2 * 3 * 800 / 50)
    memory = made().memory(Candidate(dp_shard=2, zero=3, offload=("optimizer", "parameters")))
    assert (memory.parameters, memory.gradients, memory.optimizer, memory.host_bytes) == (0, 0, 0, 800 + 800 + 1600)


def test_gathered_units_and_gradients_under_way() -> None:
    facts = replace(
        FACTS, optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0), first=replace(END, split_parameters=30)
    )
    memory = made(facts).memory(Candidate(dp_shard=2, zero=3))
    assert memory.gathered == 4 * (30 + 2 * 100)
    assert memory.buffers == 4 * 400 * (1 + 2 * 0.5)  # one that fills, and this rank's rows of two under way
    large = replace(BLOCK, split_parameters=100 * MIB)
    much = made(replace(facts, blocks=(large,) * 4)).memory(Candidate(dp_shard=2, zero=3))
    assert much.buffers == pytest.approx(2 * 4 * 100 * MIB / 3)
    assert made(replace(facts, blocks=(large,) * 4)).memory(Candidate(dp_replicate=2)).buffers == pytest.approx(
        4 * (30 + 4 * 100 * MIB - 400)
    )


def test_a_pipeline_gathers_a_unit_of_another_microbatch_too() -> None:
    facts = replace(
        FACTS, optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0), first=replace(END, split_parameters=30)
    )
    memory = made(facts, replace(FLEET, devices=4)).memory(Candidate(pp=2, dp_shard=2, zero=3, micro_batch_size=1))
    assert memory.gathered == 4 * (30 + 3 * 100)


def test_experts_lie_whole_on_their_ranks() -> None:
    block = replace(BLOCK, split_parameters=0, expert_parameters=100, expert_flops=BatchScaling(sample=1000.0),
                    ep_bytes=BatchScaling(sample=50.0))  # fmt: skip
    facts = replace(
        FACTS, blocks=(block,) * 4, ep_sizes=(2,), optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0)
    )
    memory = made(facts).memory(Candidate(dp_shard=2, ep=2, zero=3))
    assert (memory.parameters, memory.gradients) == (800, 800)
    seconds = made(facts).seconds(Candidate(dp_replicate=2, ep=2, micro_batch_size=2))
    assert seconds.experts == pytest.approx(2 * 4 * 0.5 * 100 / 100)
    assert made(facts).seconds(Candidate(dp_replicate=2, ep=1, micro_batch_size=2)).experts == 0


def test_gradients_of_experts_are_summed_over_the_ranks_that_hold_the_same_ones() -> None:
    """Of 4 data ranks with half of the experts each, two hold the same 200 elements: each sends them once."""
    block = replace(BLOCK, split_parameters=0, expert_parameters=100)
    facts = replace(FACTS, blocks=(block,) * 4, ep_sizes=(2,))
    four = made(facts, fleet=replace(FLEET, devices=4))
    assert four.seconds(Candidate(dp_replicate=4, ep=2)).gradients == pytest.approx(2 * 4 * 200 / 2 / 100)
    assert made(facts).seconds(Candidate(dp_replicate=2, ep=2)).gradients == 0


def test_a_ring_of_keys_and_values() -> None:
    block = replace(
        BLOCK,
        attention_flops=BatchScaling(pair=1.0),
        matmul_flops=BatchScaling(),
        moved_bytes=BatchScaling(),
        cp_bytes=BatchScaling(token=5.0),
    )
    facts = replace(FACTS, blocks=(block,), length=20, cp_sizes=(2,), precision="fp32")
    seconds = made(facts).seconds(Candidate(cp=2, micro_batch_size=4))
    ring = 4 * 10 * 5 / 100
    assert seconds.context == pytest.approx(ring + ring + 2 * ring)
    attention = 4 * 10 * 20 / 1000
    assert seconds.compute == pytest.approx(3.5 * attention)
    hidden = made(facts, efficiency=replace(ALL, overlap=1.0)).seconds(Candidate(cp=2, micro_batch_size=4))
    assert hidden.context == pytest.approx(ring - attention + 3 * ring - 2.5 * attention)


def test_weights_that_both_ends_share_are_held_once_and_summed_over_a_pipeline() -> None:
    end = replace(END, split_parameters=50)
    facts = replace(FACTS, first=end, last=end, tied=50, optimizer=OptimizerFootprint(name="SGD", state_bytes=0.0))
    assert made(facts).memory(Candidate(dp_replicate=2)).parameters == 4 * 450
    assert made(facts).memory(Candidate(pp=2)).parameters == 4 * 250
    assert made(facts).seconds(Candidate(pp=2)).gradients == pytest.approx(2 * 4 * 50 / 100)


def test_frozen_weights_have_neither_gradients_nor_state() -> None:
    facts = replace(FACTS, blocks=(replace(BLOCK, frozen_parameters=75),) * 4)
    memory = made(facts).memory(Candidate(dp_replicate=2))
    assert (memory.parameters, memory.gradients, memory.optimizer) == (1600, 400, 800)
    assert made(facts).seconds(Candidate(dp_replicate=2)).compute == pytest.approx(2 * 4 * (FORWARD + BACK - 0.75))


def test_the_price() -> None:
    forecast = made(fleet=replace(FLEET, nodes=2, devices=1, price_per_hour=3600.0, currency="USD"))
    estimate = forecast.estimate(Candidate(dp_replicate=2))
    assert estimate.price == pytest.approx(2 * estimate.step_seconds) and estimate.currency == "USD"
