"""A file that is marked `one_worker` runs in one worker, and the others are spread."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = """
import os, pathlib, time
import pytest
{mark}
@pytest.fixture(scope="module")
def made():
    path = pathlib.Path(__file__).with_suffix(f".{{os.getpid()}}")
    path.touch()

@pytest.mark.parametrize("k", range(8))
def test_it(made, k):
    time.sleep(0.02)
"""


def test_module_fixtures_of_a_marked_file_are_made_once(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = one_worker: as in the project\n")
    (tmp_path / "conftest.py").write_text("from tests.conftest import pytest_xdist_make_scheduler\n")
    (tmp_path / "test_together.py").write_text(TESTS.format(mark="pytestmark = pytest.mark.one_worker"))
    (tmp_path / "test_spread.py").write_text(TESTS.format(mark="").replace("range(8)", "range(40)"))
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "."],
        cwd=tmp_path,
        env=environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "48 passed" in done.stdout, done.stdout + done.stderr
    assert len(list(tmp_path.glob("test_together.[0-9]*"))) == 1
    assert len(list(tmp_path.glob("test_spread.[0-9]*"))) == 2
