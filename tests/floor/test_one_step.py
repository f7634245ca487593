"""A feature that is off leaves the hot path: one step of plain ddp enters few files, and each of them does something."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.one_worker

MOST_IN_STEP = 15
MOST_IN_FETCH = 11
OFF = [
    "faults.py",
    "launch/failures/failure_record.py",
    "parallel/batchnorm/running_statistics.py",
    "parallel/data_parallel/module_buffers.py",
    "parallel/gradients/partition.py",
    "parallel/sharding/unit_guard.py",
    "step/loss/frozen_parameters.py",
    "step/replica_context.py",
    "step/shared_memory/rng_turns.py",
    "torch_internals/pytree.py",
    "trainer/diagnostics/forecast_check.py",
    "trainer/diagnostics/memory_report.py",
    "trainer/evaluation/early_stopping.py",
    "trainer/setup/build_training_setup.py",
]
"""Features that this run does not use, and what only builds it."""


@pytest.fixture(scope="module")
def entered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Our files that steps 3 to 5 enter on rank 0, and those that fetching their batches enters."""
    folder = tmp_path_factory.mktemp("one_step")
    command = [sys.executable, str(Path(__file__).with_name("one_step.py")), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, list[str]] = json.loads((folder / "entered.json").read_text())
    return found


def test_a_step_enters_few_files(entered: dict[str, list[str]]) -> None:
    assert len(entered["step"]) <= MOST_IN_STEP, entered["step"]
    assert len(entered["fetch"]) <= MOST_IN_FETCH, entered["fetch"]


def test_what_is_off_is_not_entered(entered: dict[str, list[str]]) -> None:
    assert not {*entered["step"], *entered["fetch"]} & {*OFF}
