"""Random models, clusters and candidates, small enough to enumerate every layout."""

import random
from dataclasses import replace
from functools import cache

from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.hardware.cluster import Cluster
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile
from paceline.planner.model_costs.model_profile import BatchScaling, LayerProfile, ModelProfile, OptimizerFootprint
from paceline.planner.search.search_space import (
    SearchSpace,
    data_parallel_choices,
    microbatch_choices,
    model_parallel_choices,
    recompute_choices,
    schedule_choices,
)
from paceline.schedule import Costs, build, simulate
from paceline.schedule.timeline import Timeline


def decoder(draw: random.Random) -> ModelProfile:
    """A transformer of any shape."""
    heads = draw.choice([2, 4, 6, 8])
    width = heads * draw.choice([32, 64, 128])
    sizes = Decoder(
        layers=draw.randint(2, 10), width=width, mlp_width=draw.choice([2, 3, 4]) * width, heads=heads,
        kv_heads=draw.choice([0, 2]), vocabulary=draw.choice([64, 1000, 32000]), is_gated=draw.random() < 0.5,
        is_tied=draw.random() < 0.4, has_dropout=draw.random() < 0.4,
        **draw.choice([{}, {}, {"experts": 4, "active": 2}]),
    )  # fmt: skip
    return build_decoder_profile(
        sizes, name="drawn", length=draw.choice([16, 128, 1024]), global_batch_size=draw.choice([6, 8, 16, 24, 64]),
        precision=draw.choice(["fp32", "bf16"]),
    )  # fmt: skip


def uneven(draw: random.Random) -> ModelProfile:
    """Blocks that differ, some frozen, in a model without attention; its optimizer may look at whole tensors."""

    def part(name: str) -> LayerProfile:
        size = draw.choice([10, 1000, 10_000_000])
        return LayerProfile(
            name=name, whole_parameters=size, split_parameters=draw.choice([0, size]),
            frozen_parameters=draw.choice([0, 0, size // 2]), buffer_bytes=draw.choice([0, 100]),
            matmul_flops=BatchScaling(sample=draw.uniform(0, 1e9), fixed=draw.choice([0.0, 1e6])),
            moved_bytes=BatchScaling(sample=draw.uniform(1e3, 1e7)), saved_bytes=BatchScaling(sample=draw.uniform(1e3, 1e7)),
            split_saved_bytes=BatchScaling(sample=draw.uniform(1e3, 1e7), fixed=draw.choice([0.0, 1e5])),
            output_bytes=BatchScaling(sample=draw.uniform(1e3, 1e5)), peak_bytes=BatchScaling(sample=draw.uniform(0, 1e7)),
            tp_bytes=BatchScaling(sample=draw.uniform(1e3, 1e5)), tp_calls=2,
        )  # fmt: skip

    return ModelProfile(
        name="uneven", first=part("first"), blocks=tuple(part(f"block {i}") for i in range(draw.randint(1, 7))),
        last=part("last"), optimizer=OptimizerFootprint(name="any", state_bytes=8.0, whole_tensors=draw.random() < 0.2),
        global_batch_size=draw.choice([7, 12, 16]), tp_sizes=draw.choice([(), (2,), (2, 4)]),
        refused=draw.choice([{}, {}, {"pp": "no chain"}, {"zero=2": "no"}, {"remat": "it checkpoints by itself"}]),
    )  # fmt: skip


def fleet(draw: random.Random) -> Cluster:
    """Up to 16 devices."""
    name = draw.choice(
        ["2xcpu", "4xT4", "2x2xT4@eth-1g", "8xA100-40G", "2x8xH100-80G", "2x4xL40S@eth-25g", "2x3xV100-16G"]
    )
    return replace(parse_cluster(name), price_per_hour=draw.choice([None, 12.0]), currency="USD")


def grid(draw: random.Random) -> SearchSpace:
    """Not all of it, so that all of it can be looked at."""
    return SearchSpace(
        schedules=tuple(
            draw.sample(["1f1b", "gpipe", "interleaved", "breadth_first", "zb_h1", "zb_interleaved", "zbv"], 3)
        ),
        virtual=tuple(sorted(draw.sample([2, 3, 4], 2))),
        params=draw.choice([("fp32",), ("fp32", "bf16")]),
        zero=draw.choice([(1, 2, 3), (3,), (1, 3)]),
        micro_batch_size=draw.choice([None, None, None, 1]),
    )


@cache
def forecast(seed: int, *, memory: bool = True) -> tuple[CostModel, SearchSpace]:
    """One model on one cluster; with `memory` only some of its layouts fit, and now and then none."""
    draw = random.Random(seed)
    facts = draw.choice([decoder, decoder, uneven])(draw)
    made, tried = CostModel(profile=facts, cluster=fleet(draw)), grid(draw)
    found = [one for _ in range(12) if (one := _one(draw, made, tried)) is not None]
    if memory and found:
        peaks = sorted(made.memory(one).peak_bytes for one in found)
        made = made.with_memory_limit(draw.choice([peaks[0] * 0.9, *peaks, peaks[-1] * 2]))
    return made, tried


def some(seed: int, *, num: int = 12) -> tuple[CostModel, list[Candidate]]:
    """One model on one cluster, with some of its candidates."""
    made, tried = forecast(seed, memory=False)
    draw = random.Random(seed)
    found = (_one(draw, made, tried) for _ in range(num))
    return made, list(dict.fromkeys(candidate for candidate in found if candidate is not None))


def _one(draw: random.Random, made: CostModel, tried: SearchSpace) -> Candidate | None:
    """Down the levels of the grid, at each of them any way."""
    facts, levels = made.profile, (recompute_choices, microbatch_choices, schedule_choices)
    ways = list(model_parallel_choices(facts, made.cluster, tried))
    for level in levels:
        if ways:
            ways = list(level(draw.choice(ways), facts, tried))
    ways = list(data_parallel_choices(draw.choice(ways), facts, made.cluster, tried)) if ways else []
    return draw.choice(ways) if ways else None


def pipeline_timeline(forecast: CostModel, *, candidate: Candidate) -> Timeline:
    """The pipeline in virtual time, from the first forward to the last backward: its schedule's program alone."""
    program = build(
        candidate.schedule, ranks=candidate.pp, micro=forecast.num_micro(candidate), virtual=candidate.virtual
    )
    stages = forecast.stages_with_sharding(candidate)
    costs = Costs(
        forward=[stage.forward for stage in stages],
        backward_input=[stage.backward_input for stage in stages],
        backward_weight=[stage.backward_weight for stage in stages],
        transfer=forecast.hop_seconds(candidate),
    )
    return simulate(program, costs=costs)
