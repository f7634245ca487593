"""The reported memory and messages equal arithmetic and the kernel's own count."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.config.activation_checkpointing import parse_remat
from paceline.parallel.activation_checkpointing.checkpointing import apply_remat
from paceline.profiling.model_tracing.memory_tracker import MemoryTracker, element_bytes, memory_at_rest

pytestmark = pytest.mark.one_worker  # what they share is made once

MB = 1 << 20


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return optimizer


def test_between_steps_it_is_the_formula() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4, bias=False))
    model.register_buffer("table", torch.zeros(10))
    optimizer = trained(model)
    found = memory_at_rest(model=model, optimizers=[optimizer])
    numel = 8 * 16 + 16 + 2 * 16 + 16 * 4
    assert found.parameters == found.gradients == 4 * numel
    assert found.optimizer == 2 * 4 * numel + 4 * 5  # two moments, and a step number for each of five
    assert found.buffers == 4 * 2 * 16 + 8 + 4 * 10
    assert found.total == sum(v for k, v in found.as_json().items() if k != "total")


def test_what_shares_memory_is_counted_once() -> None:
    base = torch.zeros(100)
    assert element_bytes([base, base]) == 400
    assert element_bytes([base[:10], base[50:]]) == 240
    assert element_bytes([torch.zeros(1).expand(1000)]) == 4


class Squares(nn.Module):
    """Keeps one megabyte more with each square."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MB // 4))

    def forward(self, times: int) -> Tensor:
        x = self.weight
        for _ in range(times):
            x = x.square()
        return x.sum()


@pytest.mark.parametrize("times", [2, 5])
def test_activations_and_the_peak_are_counted_to_the_byte(times: int) -> None:
    model = Squares()
    with MemoryTracker(model=model) as watch:
        model(times).backward()
    assert watch.kept_bytes == (times - 1) * MB + 4 + 4  # the last square is not needed; the sum, its gradient
    assert watch.peak.parameters == MB
    # backward of the last square needs x to the first, twice that, and its product with the gradient
    assert watch.peak.activations == (times - 1 + 3) * MB + 4 + 4
    assert watch.peak.gradients == 0


def test_a_gradient_is_one_once_it_is_there() -> None:
    model = Squares()
    model(2).backward()
    with MemoryTracker(model=model) as watch:
        torch.zeros(3 * MB // 4).add_(1)
    assert watch.peak.as_json() == {
        "parameters": MB, "gradients": MB, "optimizer": 0, "buffers": 0, "activations": 3 * MB, "total": 5 * MB,
    }  # fmt: skip


def test_remat_shows() -> None:
    def kept(policy: str) -> int:
        blocks = [nn.Sequential(*(nn.Linear(64, 64) for _ in range(6))) for _ in range(4)]
        model = nn.Sequential(*blocks)
        apply_remat(model, policy=parse_remat(policy))
        with MemoryTracker(model=model) as watch:
            model(torch.ones(32, 64)).sum().backward()
        return watch.kept_bytes

    each = 32 * 64 * 4
    # blocks hold six results each, of which a block run again keeps none; a block's last is the next one's input
    assert kept("none") - kept("every:2") == 2 * 5 * each
    assert kept("none") - kept("full") == 4 * 5 * each


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two ranks, in a network of their own where that is allowed, so that the kernel counts no stranger's bytes."""
    script = str(Path(__file__).with_name("fsdp_checkpointing_ranks.py"))
    command = [sys.executable, script, str(tmp_path_factory.mktemp("meet") / "store")]
    alone = ["unshare", "-rn", "sh", "-c"]
    tried = shutil.which("unshare") and subprocess.run([*alone, "ip link set lo up"], capture_output=True, check=False)
    if tried and tried.returncode == 0:
        command = [*alone, 'ip link set lo up && exec "$@"', "sh", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"alone": bool(tried and tried.returncode == 0)}


def test_every_byte_on_the_wire_was_counted(two_ranks: dict[str, Any]) -> None:
    for name, found in two_ranks["flows"].items():
        assert found["counted"] in (4 * MB, 8 * MB), name
        if two_ranks["alone"]:
            # two barriers are counted too, and on a busy machine what is sent again
            assert found["counted"] <= found["wire"] < 1.25 * found["counted"], name
    assert two_ranks["flows"]["exchange"]["flows"]["receive"]["calls"] == 1


def test_sharded_weights_are_held_and_sent_by_the_formula(two_ranks: dict[str, Any]) -> None:
    found, whole = two_ranks["none"], two_ranks["none"]["whole"]
    assert found["held"]["parameters"] == found["held"]["gradients"] == whole // 2
    assert found["held"]["optimizer"] == whole + 4 * 55
    assert found["sent"]["all_gather"]["sent_bytes"] == 2 * whole // 2  # in forward and in backward
    assert found["sent"]["reduce_scatter"]["sent_bytes"] == whole // 2
    kept = two_ranks["kept whole"]
    assert kept["sent"]["all_gather"]["sent_bytes"] == whole // 2
    assert kept["kept"] - found["kept"] == whole  # the gathered weights, let go by resizing alone


def test_remat_goes_under_sharding_with_the_same_bits(two_ranks: dict[str, Any]) -> None:
    none, full, selective = (two_ranks[name] for name in ("none", "full", "selective"))
    assert none["bits"] == full["bits"] == selective["bits"]
    assert full["kept"] < selective["kept"] < none["kept"]
    assert full["sent"] == none["sent"]
    assert full["peak"]["total"] < none["peak"]["total"]
