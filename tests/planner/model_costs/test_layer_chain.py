"""A model's chain of layers: stages of nearly equal work against all cuts, and the pipeline's closed form."""

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from paceline.errors import LayoutError
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.model_costs.layer_chain import Chain, build_chain
from paceline.planner.model_costs.model_profile import LayerProfile
from paceline.planner.model_costs.stage_balance import balance_stages, slowest_by_exhaustive_search
from paceline.planner.search.branch_and_bound import search
from tests.planner.random_plans import pipeline_timeline, some

LLAMA_405B = Decoder(layers=126, width=16384, mlp_width=53248, heads=128, kv_heads=8, vocabulary=128256)


def chain(weights: list[float], ends: tuple[float, float]) -> Chain:
    """Blocks of these weights, each a part of its own."""
    parts = tuple(LayerProfile(name=str(i)) for i in range(len(weights) + 2))
    return Chain(parts=parts, order=tuple(range(2, len(parts))), weights=(*ends, *weights))


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed: int) -> None:
    draw = random.Random(seed)
    weights = [draw.choice([1.0, 1.0, 0.0, draw.uniform(0, 5)]) for _ in range(draw.randint(1, 9))]
    ends = (draw.choice([0.0, draw.uniform(0, 6)]), draw.choice([0.0, draw.uniform(0, 6)]))
    num_stages = draw.randint(1, len(weights))
    bounds = chain(weights, ends).cut_stages(num_stages)
    assert bounds[0][0] == 0 and bounds[-1][1] == len(weights) and len(bounds) == num_stages
    assert all(start < stop for start, stop in bounds)
    assert all(one[1] == two[0] for one, two in pairwise(bounds))
    work = [sum(weights[start:stop]) for start, stop in bounds]
    work[0] += ends[0]
    work[-1] += ends[1]
    best = slowest_by_exhaustive_search(num_stages=num_stages, seconds=weights, first=ends[0], last=ends[1])
    assert max(work) == pytest.approx(best, abs=1e-6)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 7, 16, 32, 64, 126])
def test_the_stages_of_a_large_model_are_as_good_as_those_of_the_slow_way(num_stages: int) -> None:
    facts = build_decoder_profile(LLAMA_405B, name="x", length=8192, global_batch_size=8)
    made = build_chain(facts)
    bounds = made.cut_stages(num_stages)
    counts = [stop - start for start, stop in bounds]
    assert max(counts) - min(counts[1:-1] or counts) <= 1 and counts[0] <= max(counts)
    each, head = made.weights[2], made.weights[1]
    slow = balance_stages(num_stages=num_stages, seconds=[each] * 126, last=head)
    assert max([each * n for n in counts[:-1]] + [each * counts[-1] + head]) == pytest.approx(slow.slowest)


@pytest.mark.parametrize("num_stages", [0, 4])
def test_stages_that_cannot_be_cut(num_stages: int) -> None:
    with pytest.raises(LayoutError, match=f"{num_stages} stages can't be cut from 3 blocks"):
        chain([1.0, 1.0, 1.0], (0.0, 0.0)).cut_stages(num_stages)


def test_a_pipeline_that_is_followed_is_near_its_closed_form() -> None:
    """Its form is never below its busiest stage, and an upper one where stages differ or messages are long."""
    apart = []
    for seed in range(40):
        made, found = some(seed)
        for candidate in [one for one in found if one.pp > 1][:3]:
            timeline = pipeline_timeline(made, candidate=candidate)
            spent = made.seconds(candidate)
            form = spent.step_seconds - spent.gradients - spent.update - spent.offload - spent.start
            assert form >= max(timeline.busy_seconds) * (1 - 1e-9)
            each = [stage.seconds for stage in made.stages_with_sharding(candidate)]
            if max(each) < 2 * min(each) and made.hop_seconds(candidate) < 0.3 * min(each):
                apart.append(abs(form / timeline.makespan - 1))
    assert len(apart) >= 15 and max(apart) < 0.25 and sorted(apart)[len(apart) // 2] < 0.05


def test_a_lower_precision_is_faster_and_is_a_setting_of_its_layout() -> None:
    sizes = Decoder(layers=8, width=1024, mlp_width=4096, heads=8, vocabulary=32000)
    fleet = parse_cluster("4xA100-80G")
    each = {
        name: CostModel(
            profile=build_decoder_profile(sizes, name="x", length=1024, global_batch_size=32, precision=name),
            cluster=fleet,
        )
        for name in ("fp32", "bf16")
    }
    alone, lower = (search(each[name]).fastest for name in ("fp32", "bf16"))
    assert lower is not None and alone is not None
    assert lower.candidate.precision == "bf16" and lower.settings["train.precision"] == "bf16"
    assert lower.step_seconds < alone.step_seconds and "train.precision" not in alone.settings


def test_a_compiled_model_moves_less() -> None:
    sizes = Decoder(layers=1, width=64, mlp_width=128, heads=4, vocabulary=10)
    plain, fused = (
        build_decoder_profile(sizes, name="x", length=8, global_batch_size=8, is_fused=is_fused).blocks[0]
        for is_fused in (False, True)
    )
    assert fused.moved_bytes.token < plain.moved_bytes.token
    assert replace(fused, moved_bytes=plain.moved_bytes) == plain
