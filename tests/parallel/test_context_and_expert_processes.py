"""`cp` and `ep` over real gloo ranks: two by default, three and four (with subgroups and both at once) in soak."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Shop

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)])
def test_real_ranks_are_one_process(ranks: int, tmp_path: Path) -> None:
    environ = {**Shop.environ({"OMP_NUM_THREADS": "1"}), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.parallel.context_and_expert_ranks", str(ranks), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
