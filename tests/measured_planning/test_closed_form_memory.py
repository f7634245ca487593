"""The closed form of the memory against the replayed step, and its inputs against known values."""

import pytest
import torch
from benchmarks.closed import Case, against, ready_for
from benchmarks.memory.jobs import llama
from torch import nn

from paceline.config.layout import parse_layout
from paceline.config.update_rule import parse_update
from paceline.measured_planning.memory_replay import replay
from paceline.measured_planning.profile.profile_job import profile_model
from paceline.measured_planning.profile.truncated_model import build_once
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import candidate_from_layout
from paceline.planner.hardware.parse_cluster import parse_cluster
from paceline.planner.layout.execution_plan import JobFacts, Resources, make_execution_plan
from paceline.planner.layout.mesh import resolve_mesh
from paceline.planner.model_costs.model_profile import ModelProfile, model_profile_from_json
from paceline.profiling.model_tracing.activation_tracker import ActivationTracker
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.profiling.model_tracing.flop_counter import AFTER_BLOCKS, BEFORE_BLOCKS
from paceline.trainer.setup.prepare import PreparedJob

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.distributed.reduce_scatter_tensor"),  # torch's own, of tp
    pytest.mark.one_worker,  # what they share is made once
]
SIZES = {"width": 256, "depth": 4, "length": 128, "vocabulary": 4096}
CASE = Case(family="llama", clusters=("4xH100-80G",), batch=16, job=SIZES)
Known = tuple[PreparedJob, ModelProfile]


@pytest.fixture(scope="module")
def known() -> Known:
    ready = ready_for(CASE)
    return ready, profile_model(ready.job, ready.settings, max_ranks=4)


@pytest.mark.parametrize(
    ("layout", "samples"),
    [
        ("ddp", 2), ("ddp,remat=full", 4), ("zero1,remat=selective", 1), ("zero2", 2), ("fsdp,remat=selective", 2),
        ("tp,sequence=true,remat=selective", 2), ("dp_shard=2,tp=2,zero=3,remat=full", 2), ("pp=2,dp_replicate=2", 2),
    ],
)  # fmt: skip
def test_it_is_near_the_replayed_step(layout: str, samples: int, known: Known) -> None:
    ready, facts = known
    fleet, asked = parse_cluster(CASE.clusters[0]), parse_layout(layout)
    mesh = resolve_mesh(asked, ranks=fleet.ranks, problems=[])
    candidate = candidate_from_layout(asked, mesh, micro_batch_size=samples, precision=facts.precision)
    found = against(CASE, CASE.clusters[0], ready, CostModel(profile=facts, cluster=fleet), candidate)
    assert abs(found.error) < 0.08, str(found)
    assert abs(found.part_error("parameters")) < 0.001 and abs(found.part_error("optimizer")) < 0.001


def test_facts_are_read_back_with_what_was_seen(known: Known) -> None:
    _, facts = known
    assert facts.blocks[0].ways.keys() == {"none", "selective", "full"}
    assert model_profile_from_json(facts.as_json()) == facts


def test_a_replay_does_not_count_the_model_that_it_copies(known: Known) -> None:
    ready, _ = known
    plan = make_execution_plan(
        layout=parse_layout("ddp"), update=parse_update("sync"), resources=Resources(ranks=2, device="cuda"),
        facts=JobFacts(global_batch_size=8, micro_batch_size=2),
    )  # fmt: skip
    jobs = (llama(**SIZES), build_once(llama(**SIZES), seed=ready.settings.seed))
    plain, copied = (replay(job, ready.settings, plan)[0].peak for job in jobs)
    assert plain == copied


def test_what_parts_hold_is_what_a_chain_of_products_must() -> None:
    width, rows = 64, 32
    blocks = {str(n): nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU()) for n in range(3)}
    each = rows * width * 4
    heard: list[ActivationTracker] = []
    with FakeExecutionMode(on_operation=lambda *told: heard[0].observe(*told) if heard else None):
        given = torch.empty(rows, width, requires_grad=True)
        for block in blocks.values():
            block[0].weight.grad = torch.zeros_like(block[0].weight)
        lives = ActivationTracker(blocks=blocks)
        heard.append(lives)
        with lives.track():
            x = given
            for block in blocks.values():
                x = block(x)
            loss = x.sum()
            del x
            lives.end_forward()
            loss.backward()
    found = lives.usage
    assert found[BEFORE_BLOCKS].kept_bytes == 0 and found[AFTER_BLOCKS].kept_bytes == 4
    for name in blocks:
        assert found[name].kept_bytes == each  # of a block its output: the product's own is let go
        weight = width * width * 4
        assert each <= found[name].transient_bytes <= 2 * each + weight + 4
