"""Properties of every forecast, for any model, cluster and layout."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from paceline.config.layout import parse_layout
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.layout_candidate import Candidate, candidate_from_layout
from paceline.planner.cost.memory import static_bytes
from paceline.planner.hardware.cluster import Cluster, Device, Link
from paceline.planner.hardware.efficiency import Efficiency
from paceline.planner.layout.mesh import resolve_mesh
from paceline.planner.layout.pipeline_options import refuse_schedule
from paceline.planner.model_costs.layer_chain import build_chain
from paceline.planner.model_costs.model_profile import ModelProfile
from paceline.planner.search.search_space import candidates
from tests.planner.random_plans import forecast, some

NEAR = 1 + 1e-9
drawn = given(st.integers(0, 10**6))
often = settings(max_examples=30, deadline=None, derandomize=True)


def pairs(seed: int, other: Callable[[CostModel], CostModel]) -> list[tuple[Estimate, Estimate]]:
    """Some candidates, as they are and as they would be; where there is none, the model says nothing."""
    made, found = some(seed)
    assume(found)
    changed = other(made)
    return [(made.estimate(candidate), changed.estimate(candidate)) for candidate in found]


def changed(seed: int, **changes: object) -> list[tuple[Estimate, Estimate]]:
    """Some candidates, and the same with something changed, where the model is all the same."""
    made, found = some(seed)
    assume(found)
    return [(made.estimate(one), made.estimate(replace(one, **changes))) for one in found]  # type: ignore[arg-type]


def on_fleet(change: Callable[[Cluster], Cluster]) -> Callable[[CostModel], CostModel]:
    return lambda made: CostModel(profile=made.profile, cluster=change(made.cluster), efficiency=made.efficiency)


def on_device(change: Callable[[Device], Device]) -> Callable[[CostModel], CostModel]:
    return on_fleet(lambda fleet: replace(fleet, device=change(fleet.device)))


def quicker_link(link: Link) -> Link:
    return replace(link, bytes_per_second=3 * link.bytes_per_second, latency_seconds=link.latency_seconds / 3)


@often
@drawn
def test_parts_are_not_negative_and_add_up(seed: int) -> None:
    made, found = some(seed)
    for estimate in map(made.estimate, found):
        memory, seconds = estimate.memory, estimate.seconds
        assert all(value >= 0 for value in memory.parts.values()), memory
        assert all(value >= -1e-9 * estimate.step_seconds for value in seconds.parts.values()), seconds
        assert sum(memory.parts.values()) == pytest.approx(estimate.peak_bytes)
        assert sum(seconds.parts.values()) == pytest.approx(estimate.step_seconds)
        assert estimate.peak_bytes >= memory.state_bytes + memory.reserve
        json.dumps([memory.parts, seconds.parts, estimate.settings])


@often
@drawn
def test_every_candidate_is_legal_and_reads_back_as_it_was_written(seed: int) -> None:
    made, found = some(seed)
    for candidate in found:
        layout = parse_layout(candidate.layout)
        problems: list[object] = []
        mesh = resolve_mesh(layout, ranks=made.cluster.ranks, problems=problems)  # type: ignore[arg-type]
        assert not problems and not refuse_schedule(layout, mesh), candidate.layout
        size, precision = candidate.micro_batch_size, candidate.precision
        assert candidate_from_layout(layout, mesh, micro_batch_size=size, precision=precision) == candidate
        assert candidate.ranks == made.cluster.ranks


def test_one_rank_that_runs_blocks_again_is_written_as_replicas() -> None:
    alone = Candidate(remat="full")
    assert alone.layout == "dp=1,remat=full" and Candidate().layout == "single"
    layout = parse_layout(alone.layout)
    assert (
        candidate_from_layout(layout, resolve_mesh(layout, ranks=1, problems=[]), micro_batch_size=1, precision="fp32")
        == alone
    )


def test_what_runs_every_second_block_again_is_taken_to_keep_all() -> None:
    layout = parse_layout("fsdp,remat=every:2")
    found = candidate_from_layout(
        layout, resolve_mesh(layout, ranks=2, problems=[]), micro_batch_size=1, precision="bf16"
    )
    assert (found.remat, found.zero, found.dp_shard) == ("none", 3, 2)


@often
@drawn
def test_all_samples_are_in_a_microbatch_and_all_blocks_in_a_stage(seed: int) -> None:
    made, found = some(seed)
    for estimate in map(made.estimate, found):
        candidate = estimate.candidate
        each = candidate.micro_batch_size * candidate.replicas
        assert (estimate.num_micro - 1) * each < made.profile.global_batch_size <= estimate.num_micro * each
        if candidate.pp > 1:
            assert sum(estimate.stages) == len(made.profile.blocks) and min(estimate.stages) >= 1
            assert len(estimate.stages) == candidate.pp * candidate.virtual


@often
@drawn
def test_more_memory_never_makes_a_plan_infeasible(seed: int) -> None:
    more = on_device(lambda device: replace(device, memory_bytes=2 * device.memory_bytes))
    for one, other in pairs(seed, more):
        assert other.fits or not one.fits
        assert other.peak_bytes == one.peak_bytes and other.step_seconds == one.step_seconds


@pytest.mark.parametrize("which", ["inside", "between", "host"])
@often
@drawn
def test_a_faster_link_is_never_slower(which: str, seed: int) -> None:
    def quick(fleet: Cluster) -> Cluster:
        return replace(fleet, **{which: quicker_link(getattr(fleet, which))})

    for one, other in pairs(seed, on_fleet(quick)):
        assert other.step_seconds <= one.step_seconds * NEAR
        assert other.peak_bytes == one.peak_bytes


@pytest.mark.parametrize("what", ["flops", "memory", "both"])
@often
@drawn
def test_a_faster_device_is_never_slower(what: str, seed: int) -> None:
    def quick(device: Device) -> Device:
        rates = {name: 2 * rate for name, rate in device.flops_per_second.items()}
        device = device if what == "memory" else replace(device, flops_per_second=rates)
        return device if what == "flops" else replace(device, bytes_per_second=2 * device.bytes_per_second)

    for one, other in pairs(seed, on_device(quick)):
        assert other.step_seconds <= one.step_seconds * NEAR


@pytest.mark.parametrize("name", ["matmul", "attention", "memory", "link", "overlap", "host"])
@often
@drawn
def test_what_is_used_better_is_never_slower(name: str, seed: int) -> None:
    def better(made: CostModel) -> CostModel:
        value = min(1.0, 1.2 * float(getattr(made.efficiency, name)))
        return CostModel(
            profile=made.profile, cluster=made.cluster, efficiency=replace(made.efficiency, **{name: value})
        )

    for one, other in pairs(seed, better):
        assert other.step_seconds <= one.step_seconds * NEAR


@often
@drawn
def test_longer_samples_take_more_of_everything(seed: int) -> None:
    def longer(made: CostModel) -> CostModel:
        facts = replace(made.profile, length=2 * made.profile.length)
        return CostModel(profile=facts, cluster=made.cluster, efficiency=made.efficiency)

    for one, other in pairs(seed, longer):
        if one.stages == other.stages:  # attention weighs more in longer ones, which may move a border
            assert other.peak_bytes >= one.peak_bytes and other.step_seconds >= one.step_seconds


@often
@drawn
def test_larger_microbatches_hold_more_and_never_take_longer_without_a_pipeline(seed: int) -> None:
    made, found = some(seed)
    for one in (candidate for candidate in found if candidate.pp == 1):
        larger = replace(one, micro_batch_size=2 * one.micro_batch_size)
        before, after = made.estimate(one), made.estimate(larger)
        if after.num_micro > 1 or before.num_micro == 1:  # at the loss of a step's only one there are no gradients yet
            assert after.peak_bytes >= before.peak_bytes
        if before.num_micro == 2 * after.num_micro:
            assert after.step_seconds <= before.step_seconds * NEAR


@often
@drawn
def test_each_stage_of_zero_leaves_less(seed: int) -> None:
    made, found = some(seed)
    for candidate in found:
        shards = replace(candidate, dp_replicate=1, dp_shard=candidate.replicas, offload=(), params="fp32")
        whole = replace(shards, dp_replicate=candidate.replicas, dp_shard=1, zero=0)
        every = [whole, *(replace(shards, zero=zero) for zero in (1, 2, 3))]
        for _, stages in made.distinct_ranks(candidate):
            elements = made.elements(candidate, stages)
            states = [static_bytes(elements, one, made.profile) for one in every]
            parameters, gradients, optimizer = zip(*states, strict=True)
            assert [sum(state) for state in states] == sorted(map(sum, states), reverse=True)
            assert parameters[0] == parameters[1] == parameters[2] >= parameters[3]
            assert gradients[0] == gradients[1] >= gradients[2] == gradients[3]
            assert optimizer[0] >= optimizer[1] == optimizer[2] == optimizer[3]


@often
@drawn
def test_more_shards_never_hold_more(seed: int) -> None:
    made, found = some(seed)
    for one in (candidate for candidate in found if candidate.dp_replicate % 2 == 0 and candidate.dp_shard > 1):
        more = replace(one, dp_replicate=one.dp_replicate // 2, dp_shard=2 * one.dp_shard)
        assert made.memory(more).peak_bytes <= made.memory(one).peak_bytes * NEAR


@often
@drawn
def test_remat_never_holds_more_and_is_never_quicker(seed: int) -> None:
    made, found = some(seed)
    for candidate in (one for one in found if one.cp == 1):
        every = [made.estimate(replace(candidate, remat=remat)) for remat in ("none", "selective", "full")]
        alive = [made.activation_peaks(one.candidate)[0] for one in every]
        held = [one.held_bytes + one.cast_bytes for one in alive]
        assert held[0] * NEAR >= held[1] >= held[2] / NEAR
        assert every[0].peak_bytes * NEAR >= every[1].peak_bytes >= every[2].peak_bytes / NEAR
        # Several stages are balanced anew: a step may be a little quicker, and its busiest rank is another one.
        assert every[0].step_seconds <= every[1].step_seconds * (NEAR if candidate.pp == 1 else 1.002)
        assert candidate.pp > 1 or every[1].seconds.again <= every[2].seconds.again


@often
@drawn
def test_a_split_sequence_never_holds_more(seed: int) -> None:
    for one, other in changed(seed, sequence=True):
        if one.candidate.tp > 1:
            assert other.peak_bytes <= one.peak_bytes * NEAR


@often
@drawn
def test_what_lies_on_the_host_does_not_lie_on_the_device(seed: int) -> None:
    made, found = some(seed)
    for candidate in (one for one in found if one.zero and made.cluster.device.is_accelerator):
        none = made.estimate(replace(candidate, offload=()))
        some_ = made.estimate(replace(candidate, offload=("optimizer",)))
        assert none.memory.host_bytes == 0 < some_.memory.host_bytes
        assert some_.peak_bytes <= none.peak_bytes and some_.step_seconds >= none.step_seconds
        if candidate.zero == 3:
            every = made.estimate(replace(candidate, offload=("optimizer", "parameters")))
            assert every.peak_bytes <= some_.peak_bytes and every.memory.host_bytes > some_.memory.host_bytes


@often
@drawn
def test_gathering_in_bfloat16_sends_and_holds_less(seed: int) -> None:
    made, found = some(seed)
    for candidate in (one for one in found if one.zero == 3):
        wide, narrow = (made.estimate(replace(candidate, params=params)) for params in ("fp32", "bf16"))
        assert narrow.peak_bytes <= wide.peak_bytes and narrow.step_seconds <= wide.step_seconds * NEAR


@often
@drawn
def test_no_step_is_quicker_than_its_operations(seed: int) -> None:
    made, found = some(seed)
    facts, device = made.profile, made.cluster.device
    once = sum(part.flops.evaluate(samples=1, length=facts.length) for part in facts.parts)
    least = facts.global_batch_size * once / device.rate(facts.precision) / made.cluster.ranks
    for candidate in found:
        if not any(part.frozen_parameters for part in facts.parts) and candidate.ep == 1:
            assert made.seconds(candidate).step_seconds >= 3 * least * (1 - 1e-9)


@often
@drawn
def test_the_price_is_the_time(seed: int) -> None:
    made, found = some(seed)
    priced = CostModel(
        profile=made.profile, cluster=replace(made.cluster, price_per_hour=36.0), efficiency=made.efficiency
    )
    free = CostModel(
        profile=made.profile, cluster=replace(made.cluster, price_per_hour=None), efficiency=made.efficiency
    )
    for candidate in found:
        estimate = priced.estimate(candidate)
        assert estimate.price == pytest.approx(estimate.step_seconds * 0.01 * made.cluster.nodes)
        assert free.estimate(candidate).price is None


@often
@drawn
def test_what_is_remembered_changes_nothing(seed: int) -> None:
    made, found = some(seed)
    for candidate in found:
        anew = CostModel(profile=made.profile, cluster=made.cluster, efficiency=made.efficiency)
        assert anew.estimate(candidate) == made.estimate(candidate) == made.estimate(candidate)


@pytest.mark.parametrize("seed", range(10))
def test_no_candidate_is_told_twice(seed: int) -> None:
    made, grid = forecast(seed)
    every = list(candidates(made.profile, made.cluster, grid))
    assert len(set(every)) == len(every)
    assert all(one.precision == made.profile.precision for one in every)


@pytest.mark.parametrize("seed", range(10))
def test_equal_parts_are_told_once_and_none_is_lost(seed: int) -> None:
    made, _ = forecast(seed)
    chain = build_chain(made.profile)
    assert sum(
        n * part.parameters for n, part in zip(chain.full_counts, chain.parts, strict=True)
    ) - made.profile.tied == (made.profile.parameters)
    assert [chain.parts[i].whole_parameters for i in chain.order] == [b.whole_parameters for b in made.profile.blocks]


def _alone(facts: ModelProfile, fleet: Cluster) -> CostModel:
    return CostModel(profile=facts, cluster=fleet, efficiency=Efficiency(step_seconds=0.0))


def test_state_is_that_of_the_papers_table_to_the_byte() -> None:
    made, _ = some(3)
    facts, p = made.profile, made.profile.parameters
    fleet = replace(made.cluster, nodes=1, devices=4)
    moments = facts.optimizer.state_bytes
    expected = {
        Candidate(dp_replicate=4): (4 * p, 4 * p, moments * p),
        Candidate(dp_shard=4, zero=1): (4 * p, 4 * p, moments * p / 4),
        Candidate(dp_shard=4, zero=2): (4 * p, p, moments * p / 4),
        Candidate(dp_shard=4, zero=3): (p, p, moments * p / 4),
        Candidate(dp_replicate=2, dp_shard=2, zero=3): (2 * p, 2 * p, moments * p / 2),
    }
    assert not any(part.frozen_parameters or part.expert_parameters for part in facts.parts)
    for candidate, state in expected.items():
        memory = _alone(facts, fleet).memory(candidate)
        assert (memory.parameters, memory.gradients, memory.optimizer) == pytest.approx(state), candidate
