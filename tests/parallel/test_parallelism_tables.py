"""The tables of the parallelisms agree: each layout has one implementation, one cost term and one parity test."""

from pathlib import Path

import pytest

from paceline.config.layout import LayoutKind
from paceline.parallel.parallelize import PARALLELISMS
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.step_time import STEP_TIME_PARTS
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.model_costs.decoder_profile import Decoder, build_decoder_profile

TESTS = Path(__file__).parents[1]
PARITY_TESTS = {
    "pp": "test_pipeline_processes.py",
    "ep": "test_expert_parallel.py",
    "tp": "test_tensor_parallel_processes.py",
    "cp": "test_context_parallel.py",
    "fsdp": "test_sharded_training.py",
    "hsdp": "test_exact_mode_in_every_layout.py",
    "zero1": "test_sharded_training.py",
    "zero2": "test_sharded_training.py",
    "ddp": "test_exact_mode_in_every_layout.py",
}
WORDS = {"ep": "Experts", "tp": "tensor", "cp": "context", "pp": "pipeline"}
"""The word that a parity test has for a layout, where it does not use the layout's own."""
CANDIDATES = {
    "pp": Candidate(pp=8),
    "ep": Candidate(dp_replicate=8, ep=8),
    "tp": Candidate(tp=8),
    "cp": Candidate(cp=8),
    "fsdp": Candidate(dp_shard=8, zero=3),
    "hsdp": Candidate(dp_replicate=2, dp_shard=4, zero=3),
    "zero1": Candidate(dp_shard=8, zero=1),
    "zero2": Candidate(dp_shard=8, zero=2),
    "ddp": Candidate(dp_replicate=8),
}
MIXTURE = Decoder(layers=32, width=4096, mlp_width=14336, heads=32, kv_heads=8, vocabulary=128256, experts=8, active=2)
OTHERS = {"single", "threads", "axes"}
"""One process, threads of one process (`parallelize_thread_replica`), and products of the others."""


def test_each_layout_has_one_implementation_and_one_parity_test() -> None:
    layouts = [layout for entry in PARALLELISMS for layout in entry.layouts]
    assert sorted(layouts) == sorted({str(kind) for kind in LayoutKind} - OTHERS) == sorted(PARITY_TESTS)
    for layout, name in PARITY_TESTS.items():
        assert WORDS.get(layout, layout) in next(TESTS.rglob(name)).read_text(), f"{name} does not test {layout}"


def test_the_parts_have_names_and_reasons_of_their_own() -> None:
    names = [entry.parallelism.name for entry in PARALLELISMS]
    assert len(set(names)) == len(names) and all(len(entry.reason.split()) > 3 for entry in PARALLELISMS)
    assert len({type(entry.parallelism) for entry in PARALLELISMS}) == len(PARALLELISMS)


def test_each_parallelism_has_a_cost_term() -> None:
    for entry in PARALLELISMS:
        assert entry.cost in STEP_TIME_PARTS if entry.layouts else entry.cost in ("", *STEP_TIME_PARTS), (
            entry.parallelism.name
        )


@pytest.mark.parametrize("layout", CANDIDATES)
def test_the_cost_term_is_there_with_the_layout_and_not_without(layout: str) -> None:
    (cost,) = {entry.cost for entry in PARALLELISMS if layout in entry.layouts}
    facts = build_decoder_profile(MIXTURE, name="mixture", length=8192, global_batch_size=64)
    model = CostModel(profile=facts, cluster=parse_cluster("8x1xT4"))  # nodes of one device: no message is hidden
    with_it, alone = model.estimate(CANDIDATES[layout]).seconds, model.estimate(Candidate()).seconds
    assert getattr(with_it, cost) > 0 == getattr(alone, cost)
