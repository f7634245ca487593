"""CPU ranks reuse freed memory in their next step, unless the user configured malloc otherwise."""

import platform
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.launch.failures.oom_detection import process_memory
from paceline.launch.launcher import LaunchRequest, start
from paceline.run_folder.run_folder import RunFolder

MB = 1 << 20
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library does as it does")


def _addresses() -> int:
    """Bytes that this process may write to, used or not."""
    kept = [bytes(2000) for _ in range(100)]
    assert kept
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData"))


def run(payload: dict[str, Any]) -> int:
    """One rank: how much of 256 MiB in large tensors, and of as much in small ones, is still resident once freed; how
    many addresses a thread takes.
    """
    kept = []
    for size, count in ((64 * MB, 4), (MB, 256)):
        before = process_memory()
        tensors = [torch.ones(size // 4) for _ in range(count)]
        assert process_memory() - before > 0.8 * size * count  # free room may have been there
        del tensors
        kept.append(process_memory() - before)
    before = _addresses()
    with ThreadPoolExecutor(1) as pool:
        kept.append(pool.submit(_addresses).result() - before)
    Path(payload["answer"]).write_text(" ".join(map(str, kept)))
    return 0


@pytest.mark.parametrize("told", ["", "malloc", "ulimit"])
def test_what_is_freed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str) -> None:
    root = str(Path(__file__).parents[3])
    monkeypatch.setenv("PYTHONPATH", ":".join([root, *(p for p in sys.path if p)]))
    if told == "malloc":
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    payload = {"answer": str(tmp_path / "answer")}
    folder = RunFolder(tmp_path / "run")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    try:
        if told == "ulimit":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 42, hard))
        outcome = start(
            LaunchRequest(
                ranks=1, run=folder, entry="tests.launch.agent.test_freed_memory_is_reused:run", payload=payload
            )
        )
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert outcome.exit_code == 0, outcome.failure
    large, small, thread = map(int, (tmp_path / "answer").read_text().split())
    assert (small < 32 * MB) if told == "malloc" else (small > 200 * MB) or told  # a ulimit leaves malloc as it is
    assert (thread < 32 * MB) if told else (thread > 64 * MB)
    assert large < 32 * MB  # of these the holes would be wasted
