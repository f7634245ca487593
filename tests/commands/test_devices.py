"""Devices as CUDA counts them, and a cache folder for a user without a home folder."""

from pathlib import Path

import pytest

from paceline.commands.common.devices import choose_ranks
from paceline.errors import PacelineError
from paceline.launch.launcher_variables import detect_world
from paceline.planner.layout import host_resources as machine
from paceline.planner.layout.execution_plan import refuse_backend
from paceline.profiling.backends import available_backends
from paceline.profiling.machine_benchmarks.benchmark_cache import cache_folder


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
    assert machine.visible_gpus(folder=folder, driver_files=()) == expected


def test_where_there_is_no_home_there_is_a_cache_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    assert cache_folder(environ={"XDG_CACHE_HOME": "a/folder"}) == cache_folder(environ={})
    assert cache_folder(environ={"XDG_CACHE_HOME": "/a"}) == Path("/a/paceline")
    monkeypatch.setattr(Path, "home", no_home)
    for environ in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "a/folder"}):
        assert cache_folder(environ=environ).is_absolute()


def test_numbers_that_a_shell_has_left_over_are_said_with_what_takes_them_away() -> None:
    left = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    problems: list[PacelineError] = []
    choose_ranks(2, detect_world(left), "cpu", problems)
    (problem,) = problems
    assert "RANK=0 WORLD_SIZE=1" in str(problem) and "unset RANK WORLD_SIZE" in str(problem)
    problems.clear()
    choose_ranks(2, detect_world({**left, "TORCHELASTIC_RUN_ID": "x"}), "cpu", problems)
    assert "unset" not in str(problems[0]) and "torchrun started 1" in str(problems[0])


@pytest.mark.parametrize("asked", ["nccl", "mpi", "ucc"])
def test_a_backend_that_torch_lacks_is_refused_with_those_that_it_has(asked: str) -> None:
    has = available_backends()
    found = refuse_backend(asked, has)
    assert bool(found) is (asked not in has)
    for problem in found:
        assert f"no backend {asked}" in str(problem) and f"it has {', '.join(has)}" in str(problem)
    assert refuse_backend("auto", ()) == [] and refuse_backend("gloo", ("gloo",)) == []
