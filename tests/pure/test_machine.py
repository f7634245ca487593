"""What a machine has: GPUs as CUDA counts them, and a cache where there is no home."""

from pathlib import Path

import pytest

from paceline.measure.probe.cache import cache_folder
from paceline.plan import machine


@pytest.mark.parametrize(
    ("asked", "there", "expected"),
    [
        (None, 4, 4),
        (None, None, 0),
        ("", 4, 0),
        ("0", None, 0),
        ("0,1", 4, 2),
        ("0,1,2,3,4,5", 4, 4),
        ("garbage", 4, 0),
        ("NoDevFiles", 4, 0),
        ("none", 4, 0),
        ("-1", 4, 0),
        ("0,-1,1", 4, 1),
        (" 1 , 0 ", 4, 2),
        ("GPU-1b2c-3d", 4, 1),
        ("MIG-aa/1/0,MIG-aa/2/0", 1, 2),
    ],
)
def test_gpus_are_counted_as_cuda_counts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: str | None, there: int | None, expected: int
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if asked is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", asked)
    folder = tmp_path / "gpus"
    for number in range(there or 0):
        (folder / str(number)).mkdir(parents=True)
    assert machine.visible_gpus(folder=folder, drivers=()) == expected


def test_where_there_is_no_home_there_is_a_cache_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache_folder(environ={}).is_absolute()
