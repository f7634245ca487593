"""On a GPU: the examples at world 1, and no host-device synchronisation inside a step. Run with `pytest -m gpu`."""

import warnings

import pytest
import torch

from paceline.comm.process_group import World
from paceline.config.compression import parse_compress
from paceline.config.layout import parse_layout
from paceline.config.settings import Settings, Train
from paceline.config.update_rule import parse_update
from paceline.data.loader import make_loader
from paceline.data.order.cursor import Cursor
from paceline.data.types import BatchPartition
from paceline.job import Job
from paceline.planner.layout.execution_plan import ExecutionPlan, JobFacts, Resources, make_execution_plan
from paceline.trainer.setup.build_training_setup import build_training_setup

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


def plan_of(layout: str, *, ranks: int, device: str, batch: int, micro: int) -> ExecutionPlan:
    return make_execution_plan(
        layout=parse_layout(layout), update=parse_update("sync"), compress=parse_compress("none"),
        resources=Resources(ranks=ranks, device=device),
        facts=JobFacts(global_batch_size=batch, micro_batch_size=micro, threads=1),
    )  # fmt: skip


def test_a_step_never_waits_for_the_device() -> None:
    data = [(torch.randn(16), torch.tensor(i % 4)) for i in range(256)]
    job = Job(
        model=lambda: torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4)),
        loss=lambda o, b: (torch.nn.functional.cross_entropy(o, b[1], reduction="sum"), len(b[1])),
        train_data=data,
        optimizer=lambda named: torch.optim.AdamW([p for _, p in named], fused=True),
        global_batch_size=32,
    )
    plan = plan_of("single", ranks=1, device="cuda", batch=32, micro=32)
    world = World.alone(device=torch.device("cuda", 0))
    step = build_training_setup(job=job, settings=Settings(train=Train(max_grad_norm=1.0)), plan=plan, world=world).step
    cut = BatchPartition(global_batch_size=32, micro_batch_size=32)
    feed = iter(
        make_loader(data=data, collate=None, order=None, seed=0, partition=cut, cursor=Cursor(), pin_memory=True)
    )
    for _ in range(3):
        step.run(next(feed))
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(5):
                step.run(next(feed))
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:0"), ("cuda:0", "cpu")])
def test_replicas_as_threads_on_and_beside_a_gpu(devices: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas on one GPU, and weights that are copied to another device, against one process on the CPU."""
    monkeypatch.setattr("paceline.comm.rank_threads._device", lambda world, rank: torch.device(devices[rank]))
    data = [(torch.randn(16, dtype=torch.float64), torch.tensor(i % 4)) for i in range(64)]
    job = Job(
        model=lambda: torch.nn.Linear(16, 4, dtype=torch.float64),
        loss=lambda o, b: (torch.nn.functional.cross_entropy(o, b[1], reduction="sum"), len(b[1])),
        train_data=data,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        global_batch_size=30,
    )
    weights = []
    for replicas, device in ((2, torch.device("cuda", 0)), (1, torch.device("cpu"))):
        plan = plan_of("threads", ranks=replicas, device=device.type, batch=30, micro=8)
        made = build_training_setup(job=job, settings=Settings(), plan=plan, world=World.alone(device=device))
        cut = BatchPartition(global_batch_size=30, micro_batch_size=8)
        feed = iter(make_loader(data=data, collate=None, order=None, seed=0, partition=cut, cursor=Cursor()))
        for _ in range(4):
            made.step.run(next(feed))
        weights.append([p.detach().cpu() for p in made.model.parameters()])
        made.close()
    for ours, right in zip(*weights, strict=True):
        torch.testing.assert_close(ours, right, rtol=1e-12, atol=1e-12)  # sums of 16 products in another order


def test_a_step_that_is_not_finite_is_left_out_on_a_gpu_too() -> None:
    data = [(torch.full((4,), float("nan") if i == 5 else 1.0), torch.tensor(i % 2)) for i in range(16)]
    job = Job(
        model=lambda: torch.nn.Linear(4, 2),
        loss=lambda o, b: (torch.nn.functional.cross_entropy(o, b[1], reduction="sum"), len(b[1])),
        train_data=data,
        optimizer=lambda named: torch.optim.SGD([p for _, p in named], lr=0.1),
        global_batch_size=4,
    )
    plan = plan_of("single", ranks=1, device="cuda", batch=4, micro=4)
    world = World.alone(device=torch.device("cuda", 0))
    made = build_training_setup(job=job, settings=Settings(train=Train(on_nonfinite="skip")), plan=plan, world=world)
    feed = make_loader(
        data=data, collate=None, order="sequential", seed=0, partition=BatchPartition(global_batch_size=4, micro_batch_size=4),
        cursor=Cursor(),
    )  # fmt: skip
    assert [made.step.run(given).skipped for given, _ in zip(feed, range(4), strict=False)] == [
        False,
        True,
        False,
        False,
    ]
    assert all(bool(parameter.isfinite().all()) for parameter in made.model.parameters())
