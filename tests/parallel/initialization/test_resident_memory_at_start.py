"""Resident memory at the start of a 200 MB model: one rank builds it below the limit, none above it."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from paceline.comm.process_group import LaunchInfo, World
from paceline.launch.launcher import LaunchRequest, start
from paceline.parallel.initialization.deferred_init import defer_init
from paceline.parallel.initialization.meta_model import named_tensors, tensor_bytes
from paceline.parallel.module_access.shard_spec import ShardSpec, shard_rows
from paceline.run_folder.run_folder import RunFolder

pytestmark = pytest.mark.soak
WIDTH, DEPTH = 1024, 48


def build() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))


def high_water() -> int:
    """The most that was resident since it was last forgotten."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def run(payload: dict[str, Any]) -> int:
    """One rank: its quarter of every tensor."""
    torch.set_num_threads(1)
    world = World.join(launch_info=LaunchInfo.read(os.environ), device_type="cpu", backend="gloo", timeout_seconds=60)
    defer_init(lambda: nn.Linear(4, 4), seed=0, world=world, limit_bytes=payload["limit"]).values(
        {}
    )  # what imports bring
    world.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = psutil.Process().memory_info().rss
    made = defer_init(build, seed=0, world=world, limit_bytes=payload["limit"])
    parts = {
        name: shard_rows(ShardSpec.full(tensor.shape), shard_rank=world.rank, num_shards=world.world_size)
        for name, tensor in named_tensors(made.model).items()
    }
    values, _ = made.values(parts)
    held = sum(value.nbytes for value in values.values())
    told = {"peak": high_water() - before, "held": held, "whole": tensor_bytes(made.model)}
    Path(payload["answer"] + str(world.rank)).write_text(json.dumps(told))
    world.close()
    return 0


@pytest.mark.parametrize("limit", [1 << 40, 1 << 10])
def test_who_holds_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", ":".join([root, *(p for p in sys.path if p)]))
    payload = {"answer": str(tmp_path / "answer"), "limit": limit}
    entry = "tests.parallel.initialization.test_resident_memory_at_start:run"
    outcome = start(LaunchRequest(ranks=4, run=RunFolder(tmp_path / "run"), entry=entry, payload=payload))
    assert outcome.exit_code == 0, outcome.failure
    told = [json.loads((tmp_path / f"answer{rank}").read_text()) for rank in range(4)]
    for rank, found in enumerate(told):
        assert found["whole"] > 200_000_000 and found["held"] == found["whole"] // 4
        if limit < found["whole"] or rank:
            assert found["peak"] < 0.5 * found["whole"], told
        else:
            assert found["peak"] > 0.9 * found["whole"], told
    print(told)
