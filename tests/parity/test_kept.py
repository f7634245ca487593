"""Ranks on CPUs keep what was freed for their next step, unless the user has told malloc something else."""

import platform
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.start import Request, start
from paceline.store.runs import RunFolder
from paceline.survive.short import own_bytes

MB = 1 << 20
pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library does as it does")


def run(payload: dict[str, Any]) -> int:
    """One rank: how much of 256 MiB in large tensors, and of as much in small ones, is still resident once freed."""
    kept = []
    for size, count in ((64 * MB, 4), (MB, 256)):
        before = own_bytes()
        tensors = [torch.ones(size // 4) for _ in range(count)]
        assert own_bytes() - before > 0.8 * size * count  # free room may have been there
        del tensors
        kept.append(own_bytes() - before)
    Path(payload["answer"]).write_text(" ".join(map(str, kept)))
    return 0


@pytest.mark.parametrize("told", [False, True])
def test_what_is_freed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool) -> None:
    root = str(Path(__file__).parents[2])
    monkeypatch.setenv("PYTHONPATH", ":".join([root, *(p for p in sys.path if p)]))
    if told:
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    payload = {"answer": str(tmp_path / "answer")}
    folder = RunFolder(tmp_path / "run")
    outcome = start(Request(ranks=1, run=folder, entry="tests.parity.test_kept:run", payload=payload))
    assert outcome.exit_code == 0, outcome.failure
    large, small = map(int, (tmp_path / "answer").read_text().split())
    assert (small < 32 * MB) if told else (small > 200 * MB)
    assert large < 32 * MB  # of these the holes would be wasted
