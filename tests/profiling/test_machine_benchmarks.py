"""The machine benchmarks measure what they claim: sizes grow until they are slow, within the time limit."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from math import inf
from pathlib import Path
from statistics import fmean

import pytest
import torch

from paceline.comm.process_group import World
from paceline.errors import MachineError
from paceline.planner.hardware.benchmark_results import HardwareBenchmark, MachineFingerprint
from paceline.planner.hardware.timing_curve import TimingCurve
from paceline.planner.layout.host_resources import busy_fraction
from paceline.profiling.machine_benchmarks.benchmark_cache import cache_file, machine_fingerprint
from paceline.profiling.machine_benchmarks.benchmark_worker import load_levels, probe_world
from paceline.profiling.machine_benchmarks.collective_benchmarks import KINDS, group_sizes, neighbor_groups
from paceline.profiling.machine_benchmarks.disk_benchmark import measure_disk
from paceline.profiling.machine_benchmarks.interleaved_timer import (
    BenchmarkFamily,
    BenchmarkSize,
    TimedCall,
    _predict_seconds,
    time_families,
)
from paceline.profiling.machine_benchmarks.machine_benchmark import BenchmarkRequest, probe_machine

pytestmark = pytest.mark.clock  # what they share is made once
ROOT = Path(__file__).resolve().parents[2]


def sleeps(*seconds: float, times: int = 1) -> BenchmarkFamily:
    """One size for each number of seconds, which is its amount as well."""

    def make(one: float) -> Callable[[], Callable[[], object]]:
        return lambda: lambda: time.sleep(one)

    return BenchmarkFamily(
        key=("sleep",), sizes=[BenchmarkSize(amount=one, make_call=make(one), times=times) for one in seconds]
    )


def timed(*families: BenchmarkFamily, seconds: float = 0.5, limit: float = 0.3) -> dict[str, TimingCurve]:
    found = time_families(families, world=World.alone(), seconds=seconds, max_call_seconds=limit, combine_ranks=fmean)
    return {key[0]: curve for key, curve in found.items()}


def test_seconds_are_those_of_one_call() -> None:
    curve = timed(sleeps(0.001, 0.004))["sleep"]
    assert [point.amount for point in curve.points] == [0.001, 0.004]
    assert all(1 <= point.seconds / point.amount < 3 for point in curve.points)
    four = timed(sleeps(0.004, times=4))["sleep"].points[0]
    assert 0.25 <= four.seconds / four.amount < 0.75


def test_sizes_stop_growing_before_one_takes_too_long() -> None:
    began = time.perf_counter()
    curve = timed(sleeps(0.001, 0.01, 0.05, 2.0, 8.0), limit=0.3)["sleep"]
    assert [point.amount for point in curve.points] == [0.001, 0.01, 0.05]
    assert time.perf_counter() - began < 1.5
    assert len(timed(sleeps(0.05), limit=0.01)["sleep"].points) == 1  # the first is measured in any case


def test_what_cannot_be_done_here_is_left_out() -> None:
    def refuse() -> Callable[[], object]:
        raise RuntimeError("not implemented for 'Half'")

    never = BenchmarkFamily(key=("never",), sizes=[BenchmarkSize(amount=1, make_call=refuse)])
    later = BenchmarkFamily(key=("later",), sizes=[*sleeps(0.001).sizes, BenchmarkSize(amount=1, make_call=refuse)])
    found = timed(never, later)
    assert set(found) == {"later"} and len(found["later"].points) == 1


def test_trials_take_turns_and_one_disturbance_does_not_count() -> None:
    calls: list[str] = []

    def noting(name: str) -> BenchmarkFamily:
        def call() -> None:
            calls.append(name)
            time.sleep(0.1 if name == "a" and calls.count("a") == 12 else 0.005)

        return BenchmarkFamily(key=(name,), sizes=[BenchmarkSize(amount=1, make_call=lambda: call)])

    found = timed(noting("a"), noting("b"), seconds=0.6)
    assert "".join(calls).count("ab") >= 3, calls
    assert found["a"].points[0].seconds < 0.02


def test_others_may_disturb_some_parts_of_a_turn_but_ranks_that_share_cores_always_do() -> None:
    """Every fourth call waits for a core."""

    def measured(*, crowded: bool) -> float:
        count = [0]

        def call() -> None:
            count[0] += 1
            time.sleep(0.02 if count[0] % 4 == 0 else 0.001)

        busy = BenchmarkFamily(key=("busy",), sizes=[BenchmarkSize(amount=1, make_call=lambda: call)])
        found = time_families(
            [busy], world=World.alone(), seconds=0.5, max_call_seconds=0.3, combine_ranks=fmean, shares_cores=crowded
        )
        return found[("busy",)].points[0].seconds

    assert measured(crowded=False) < 0.003 < 0.004 < measured(crowded=True)


def test_the_first_call_after_a_pause_is_not_timed_on_a_link() -> None:
    """A bucket that fills while nothing is sent, the other way round so that it shows: the first call is slow."""

    def measured(*, lead: bool) -> float:
        last = [0.0]

        def call() -> None:
            paused = time.perf_counter() - last[0] > 0.02
            time.sleep(0.05 if paused else 0.001)
            last[0] = time.perf_counter()

        link = BenchmarkFamily(key=("link",), sizes=[BenchmarkSize(amount=1, make_call=lambda: call)])
        families, world = (link, sleeps(0.03)), World.alone()
        found = time_families(
            families, world=world, seconds=0.3, max_call_seconds=0.3, combine_ranks=fmean, has_untimed_call=lead
        )
        return found[("link",)].points[0].seconds

    assert measured(lead=True) < 0.5 * measured(lead=False)


def test_a_size_is_not_left_out_for_a_disturbance_of_the_one_before() -> None:
    """What was looked at last counts as steep as from nothing, not as from one that happened to be quick."""

    def looked(amount: float, seconds: float) -> TimedCall:
        size = BenchmarkSize(amount=amount, make_call=lambda: lambda: None)
        return TimedCall(key=("x",), size=size, call=lambda: None, seconds=seconds)

    assert _predict_seconds([looked(1, 0.001)], 16) == 0.001
    assert _predict_seconds([looked(1, 0.001), looked(2, 0.002)], 4) == pytest.approx(0.004)
    assert _predict_seconds([looked(1, 0.001), looked(2, 0.0015)], 4) == pytest.approx(0.0025)
    assert _predict_seconds([looked(1, 0.0001), looked(2, 0.03)], 4) == pytest.approx(0.06)
    assert _predict_seconds([looked(1, 0.003), looked(2, 0.001)], 400) == 0.001


def test_the_time_holds_though_there_is_much_to_do() -> None:
    def family(number: int) -> BenchmarkFamily:
        return BenchmarkFamily(key=(str(number),), sizes=sleeps(*(0.001 * size for size in range(1, 13))).sizes)

    began = time.perf_counter()
    found = timed(*map(family, range(40)), seconds=1.0, limit=0.1)
    assert time.perf_counter() - began < 8  # of 15 or more if all sizes were looked at
    assert len(found) == 40 and all(len(curve.points) >= 3 for curve in found.values())


@pytest.mark.parametrize(
    ("ranks", "cores", "device", "wanted"),
    [
        (1, 2, "cpu", [(1, 2)]),
        (2, 2, "cpu", [(1, 2), (2, 1)]),
        (6, 8, "cpu", [(1, 8), (2, 4), (4, 2), (6, 1)]),
        (8, 32, "cuda", [(1, 32), (8, 4)]),
    ],
)
def test_processes_are_busy_with_the_threads_that_a_run_of_so_many_has(
    ranks: int, cores: int, device: str, wanted: list[tuple[int, int]]
) -> None:
    assert load_levels(ranks=ranks, cores=cores, device=device) == wanted


def test_groups() -> None:
    assert [group_sizes(ranks) for ranks in (1, 2, 3, 8)] == [(), (2,), (2, 3), (2, 4, 8)]
    assert neighbor_groups(5, size=2) == [[0, 1], [2, 3], [4]] and neighbor_groups(4, size=4) == [[0, 1, 2, 3]]


def test_a_disk_leaves_nothing_and_one_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    found = measure_disk(World.alone(), folder=tmp_path / "not" / "yet", seconds=0.2)
    assert found is not None and found.write_rate > 0 and found.read_rate > 0 and found.folder == str(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert measure_disk(World.alone(), folder=Path("/proc"), seconds=0.2) is None


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[HardwareBenchmark, Path, float]:
    """Two gloo processes, in little time."""
    home = tmp_path_factory.mktemp("home")
    before = {name: os.environ.get(name) for name in ("XDG_CACHE_HOME",)}
    os.environ["XDG_CACHE_HOME"] = str(home)
    began = time.perf_counter()
    try:
        found = probe_machine(ranks=2, request=BenchmarkRequest(seconds=6.0, folder=home))
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.__setitem__(name, value)
    return found, home, time.perf_counter() - began


def curves(found: HardwareBenchmark) -> list[TimingCurve]:
    own = [one.curve for one in found.collectives]
    for rates in found.rates:
        for each in (rates.attention, rates.attention_trained, rates.streams, rates.optimizers):
            own += each.values()
        own += [products.square for products in rates.products.values()]
    return own


def test_two_ranks_find_all_of_it(measured: tuple[HardwareBenchmark, Path, float]) -> None:
    found, _, _ = measured
    assert found.backend == "gloo" and found.fingerprint.ranks == 2
    assert [rates.busy for rates in found.rates] == [1, 2]
    for rates in found.rates:
        assert {"fp32", "bf16"} <= set(rates.products) and {"fp32", "bf16"} <= set(rates.attention)
        assert set(rates.streams) == {"copy", "add", "gelu", "norm"} and "adamw" in rates.optimizers
        assert 0 < rates.operation_seconds < 1 and 0 < rates.trained_operation_seconds < 1
        assert all(slow > 0 for products in rates.products.values() for _, slow in products.narrow)
    assert [(one.kind, one.ranks) for one in found.collectives] == [(kind, 2) for kind in KINDS]
    assert found.disk is not None and found.disk.write_rate > 0 and found.copies == {}


def test_every_number_is_positive_and_more_takes_longer(measured: tuple[HardwareBenchmark, Path, float]) -> None:
    found, _, _ = measured
    for curve in curves(found):
        told = [point.seconds for point in curve.points]
        assert told[0] > 0 and told == sorted(told)
        assert curve.line.each_seconds > 0 and 0 <= curve.line.residual < inf
        assert curve.seconds(10 * curve.points[-1].amount) > told[-1]
    for one in found.collectives:
        assert found.collective_seconds(one.kind, num_bytes=2**24, ranks=2) > one.latency_seconds > 0
        assert one.line_rate > 0


def test_what_was_measured_is_within_what_is_stated(measured: tuple[HardwareBenchmark, Path, float]) -> None:
    """Of curves in which no larger one took less: there the points are those that the line was drawn through."""
    found, _, _ = measured
    rising = [each for each in curves(found) if all(a.seconds < b.seconds for a, b in pairwise(each.points))]
    assert len(rising) >= 5
    for curve in rising:
        ratios = [curve.line.seconds(point.amount) / curve.seconds(point.amount) for point in curve.points]
        worst = max(max(ratio, 1 / ratio) for ratio in ratios)
        assert worst == pytest.approx(1 + curve.line.residual)


def test_it_is_kept_for_next_time(
    measured: tuple[HardwareBenchmark, Path, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, home, took = measured
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    monkeypatch.setattr(
        "paceline.profiling.machine_benchmarks.machine_benchmark.busy_fraction", lambda: 1.0
    )  # however quiet it is by now
    file = cache_file(found.fingerprint)
    assert json.loads(file.read_text())["fingerprint"]["cpu"] == found.fingerprint.cpu
    assert sorted(path.name for path in home.iterdir()) == ["paceline"]
    began = time.perf_counter()
    assert probe_machine(ranks=2) == found
    assert time.perf_counter() - began < took / 2
    assert took < 40  # on a machine that does much else


def test_what_was_measured_on_a_busy_machine_holds_until_it_is_quiet(
    measured: tuple[HardwareBenchmark, Path, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share, calls = [0.9], []

    def fake(mark: MachineFingerprint, asked: BenchmarkRequest) -> HardwareBenchmark:
        calls.append(mark)
        return replace(measured[0], others=share[0], took_seconds=float(len(calls)))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("paceline.profiling.machine_benchmarks.machine_benchmark._run_benchmark", fake)
    monkeypatch.setattr("paceline.profiling.machine_benchmarks.machine_benchmark.busy_fraction", lambda: share[0])
    first = probe_machine(ranks=2)
    assert not first.is_quiet and probe_machine(ranks=2) == first and len(calls) == 1
    share[0] = 0.05
    second = probe_machine(ranks=2)
    assert second.is_quiet and second.took_seconds == 2.0
    share[0] = 0.9
    assert probe_machine(ranks=2) == second and len(calls) == 2
    assert probe_machine(ranks=2, refresh=True).took_seconds == 3.0 and calls[0] == measured[0].fingerprint


def test_what_others_do_meanwhile_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not children of this process, as those of another program are not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    spin = f"{sys.executable} -c 'while True: pass' >/dev/null 2>&1 & echo $!"
    started = [subprocess.run(["sh", "-c", spin], check=True, capture_output=True) for _ in range(os.cpu_count() or 1)]
    try:
        found = probe_machine(ranks=1, request=BenchmarkRequest(seconds=2.0, folder=tmp_path))
    finally:
        for one in started:
            os.kill(int(one.stdout), signal.SIGKILL)
    assert found.others is not None and found.others > 0.3 and not found.is_quiet


def test_how_busy_the_machine_is() -> None:
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        assert 0.5 / (os.cpu_count() or 1) < busy_fraction() <= 1
    finally:
        spin.kill()
        spin.wait()


def test_a_process_keeps_its_threads(tmp_path: Path) -> None:
    mark, before = machine_fingerprint(ranks=1, device="cpu", ranks_per_node=1), torch.get_num_threads()
    torch.set_num_threads(mark.threads + 1)
    try:
        probe_world(World.alone(), mark, seconds=0.2, folder=tmp_path, ranks_per_node=1)
        assert torch.get_num_threads() == mark.threads + 1
    finally:
        torch.set_num_threads(before)


def test_a_probe_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        "paceline.profiling.machine_benchmarks.machine_benchmark.ENTRY",
        "paceline.profiling.machine_benchmarks.benchmark_worker:not_there",
    )
    with pytest.raises(MachineError, match="machine benchmark of 1 rank") as caught:
        probe_machine(ranks=1)
    assert "not_there" in caught.value.cause and not list(tmp_path.iterdir())


def test_ranks_of_a_launcher_measure_too(tmp_path: Path) -> None:
    """Each on a machine of its own with one core, as far as they are told."""
    script = f"""
import os, sys
from pathlib import Path
cores = sorted(os.sched_getaffinity(0))
os.sched_setaffinity(0, [cores[int(os.environ["RANK"]) % len(cores)]])
from paceline.launch.launcher_variables import detect_world
from paceline.profiling.machine_benchmarks.machine_benchmark import BenchmarkRequest, probe_joined_world
found = probe_joined_world(detect_world(os.environ), request=BenchmarkRequest(seconds=2.0, folder=Path({str(tmp_path)!r})))
print(None if found is None else [(r.busy, r.threads) for r in found.rates], file=sys.stderr)
"""
    own = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    own |= {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            env={**os.environ, **own, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "[(1, 1)]" in said[0] and "None" in said[1], said


def free_port() -> int:
    listener = torch.distributed.TCPStore("127.0.0.1", 0, 1, True)  # type: ignore[attr-defined]
    return int(listener.port)


def test_a_fingerprint_crosses_to_the_ranks_as_json(measured: tuple[HardwareBenchmark, Path, float]) -> None:
    mark = measured[0].fingerprint
    payload = BenchmarkRequest(seconds=10.0).payload(mark, answer=Path("answer"), ranks_per_node=2)
    assert json.loads(json.dumps(payload))["fingerprint"] == {**asdict(mark), "gpus": []}
    assert payload["seconds"] == pytest.approx(6.0)
