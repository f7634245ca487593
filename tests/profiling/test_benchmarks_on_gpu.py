"""A probe of GPUs: rates that a GPU has and a CPU has not, copies, and NCCL where there are two. `pytest -m gpu`."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from paceline.planner.hardware.benchmark_results import HardwareBenchmark
from paceline.profiling.machine_benchmarks.collective_benchmarks import KINDS
from paceline.profiling.machine_benchmarks.machine_benchmark import BenchmarkRequest, probe_machine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


def probed(home: Path, *, ranks: int) -> HardwareBenchmark:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        return probe_machine(ranks=ranks, device="cuda", request=BenchmarkRequest(seconds=20.0, folder=home))


def test_one_gpu(home: Path) -> None:
    found = probed(home, ranks=1)
    rates = found.rates_for(1)
    assert found.fingerprint.gpus and found.collectives == () and found.took_seconds < 30
    assert {"fp32", "bf16", "fp16"} == set(rates.products) == set(rates.attention)
    work = 2.0 * 4096**3
    assert rates.products["bf16"].square.rate(work) > rates.products["fp32"].square.rate(work)
    assert rates.products["bf16"].square.best_rate > 10e12  # launching is not what was timed
    assert rates.streams["copy"].last_rate > 50e9
    assert 1e-7 < rates.operation_seconds < 1e-3
    assert set(found.copies) == {"to_device", "to_host"}
    for curve in found.copies.values():
        assert 1e8 < curve.last_rate < 1e12
        assert all(one.seconds <= other.seconds for one, other in pairwise(curve.points))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_and_what_joins_them(home: Path) -> None:
    found = probed(home, ranks=2)
    assert found.backend == "nccl" and [rates.busy for rates in found.rates] == [1, 2]
    assert [(one.kind, one.ranks) for one in found.collectives] == [(kind, 2) for kind in KINDS]
    assert all(one.line_rate > 1e8 and 1e-7 < one.latency_seconds < 1e-2 for one in found.collectives)
