"""The benchmarks still run: each is imported as a command is, and the two that compare the loop measure a few rounds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
COMMANDS = sorted(path.name for path in BENCHMARKS.glob("*.py") if "ArgumentParser" in path.read_text())

pytestmark = pytest.mark.soak


def run(*words: str) -> str:
    command = [sys.executable, "-W", "ignore", str(BENCHMARKS / words[0]), *words[1:]]
    environ = {**os.environ, "PYTHONPATH": str(BENCHMARKS.parent)}  # `published` is run as a module
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_is_found_and_explains_itself(name: str) -> None:
    assert "usage:" in run(name, "--help")


def test_the_loop_has_the_weights_of_the_plain_loop() -> None:
    assert "weights bit for bit those of the plain loop: True" in run("overhead.py", "--rounds", "2")


def test_layouts_are_compared_with_loops_by_hand() -> None:
    told = run("layouts.py", "--rounds", "1")
    rows = [line for line in told.splitlines() if line.strip().startswith("paceline ")]
    assert len(rows) == 3, told
    assert all(float(row.split()[-1]) < 1e-4 for row in rows), told
