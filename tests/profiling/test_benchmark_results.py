"""Benchmark results are read correctly: fitted lines, interpolation, JSON and the cache."""

import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.bytes_sent import SENT_BYTES_PER_BYTE
from paceline.errors import MachineError
from paceline.planner.hardware.benchmark_results import (
    CollectiveTimings,
    Disk,
    HardwareBenchmark,
    MachineFingerprint,
    MatmulTimings,
    Rates,
    read_probe,
)
from paceline.planner.hardware.timing_curve import Point, TimingCurve, fit_line, read_curve
from paceline.profiling.machine_benchmarks.benchmark_cache import (
    cache_file,
    machine_fingerprint,
    read_cached_benchmark,
    store_benchmark,
)

AMOUNTS = [2.0**power for power in range(6, 28, 3)]
FIXED, EACH = 2e-5, 1e-9


def law(amount: float) -> float:
    return FIXED + EACH * amount


def curve(fixed: float = FIXED, each: float = EACH) -> TimingCurve:
    return TimingCurve.from_points(Point(amount=amount, seconds=fixed + each * amount) for amount in AMOUNTS)


def noisy(seed: int, share: float) -> list[Point]:
    draw = random.Random(seed)
    return [Point(amount=amount, seconds=law(amount) * (1 + draw.uniform(-share, share))) for amount in AMOUNTS]


def test_a_law_comes_back() -> None:
    line = fit_line([Point(amount=amount, seconds=law(amount)) for amount in AMOUNTS])
    assert line.fixed_seconds == pytest.approx(FIXED, rel=1e-3) and line.rate == pytest.approx(1 / EACH, rel=1e-3)
    assert line.residual < 1e-4
    amount = 12_345.0
    assert amount / line.seconds(amount) == pytest.approx(line.rate * amount / (amount + line.half_rate_amount))


@pytest.mark.parametrize("at", [0, 3, 7])
def test_one_disturbed_point_does_not_draw_the_line(at: int) -> None:
    points = [Point(amount=amount, seconds=law(amount)) for amount in AMOUNTS]
    points[at] = replace(points[at], seconds=3 * points[at].seconds)
    line = fit_line(points)
    assert line.fixed_seconds == pytest.approx(FIXED, rel=0.02) and line.rate == pytest.approx(1 / EACH, rel=0.02)
    assert line.residual == pytest.approx(2, abs=0.1) and line.middle < 0.02


@pytest.mark.parametrize("seed", range(20))
def test_the_residual_is_the_worst_distance_of_a_point(seed: int) -> None:
    points = noisy(seed, 0.3)
    line = fit_line(points)
    ratios = [line.seconds(point.amount) / point.seconds for point in points]
    assert line.residual == pytest.approx(max(max(ratio, 1 / ratio) for ratio in ratios) - 1)
    assert line.residual < 0.9


@pytest.mark.parametrize("seed", range(20))
def test_between_the_points_a_law_is_met_within_the_residual(seed: int) -> None:
    found = TimingCurve.from_points(noisy(seed, 0.03))
    for low, high in pairwise(AMOUNTS):
        middle = (low * high) ** 0.5
        assert abs(found.seconds(middle) / law(middle) - 1) <= found.line.residual + 0.03
    assert found.line.residual < 0.08


def test_points_of_a_cache_and_of_memory_are_both_met_though_no_line_meets_them() -> None:
    def seconds(amount: float) -> float:
        return 1e-6 + amount / 80e9 + max(0.0, amount - 2**20) / 8e9

    found = TimingCurve.from_points(Point(amount=amount, seconds=seconds(amount)) for amount in AMOUNTS)
    assert found.line.residual > 0.2
    for amount in (2**10, 2**17, 2**26, 2**30):
        assert found.seconds(amount) == pytest.approx(seconds(amount), rel=0.25)
    assert found.best_rate > 4 * found.last_rate


points = st.lists(
    st.tuples(st.floats(1, 1e12), st.floats(1e-9, 1e3)), min_size=1, max_size=9, unique_by=lambda pair: pair[0]
)


@given(points, st.lists(st.floats(0, 1e14), min_size=2, max_size=8))
def test_more_never_takes_less(pairs: list[tuple[float, float]], asked: list[float]) -> None:
    found = TimingCurve.from_points(Point(amount=amount, seconds=seconds) for amount, seconds in pairs)
    for wrong in ({"points": [{"amount": "x"}]}, {"line": {"residual": None}}, {"points": 3}, {"points": []}):
        with pytest.raises((ValueError, TypeError)):
            read_curve({**asdict(found), **wrong})
    assert found.line.fixed_seconds >= 0 and found.line.each_seconds > 0
    everything = sorted({*asked, *(amount for amount, _ in pairs)})
    told = [found.seconds(amount) for amount in everything]
    assert all(one <= other * (1 + 1e-9) for one, other in pairwise(told))
    last = found.points[-1]
    assert found.seconds(2 * last.amount) > 1.05 * last.seconds
    assert read_curve(json.loads(json.dumps(asdict(found)))) == found


def test_below_the_smallest_at_least_half_of_it_is_left() -> None:
    assert curve().seconds(0) == pytest.approx(FIXED)
    steep = TimingCurve.from_points([Point(amount=1, seconds=1.0), Point(amount=2, seconds=9.0)])
    assert steep.seconds(0) == 0.5 and TimingCurve.from_points([Point(amount=3, seconds=1.0)]).seconds(0) == 1.0


def test_a_large_fixed_part_is_not_left_out_where_memory_bends_the_line() -> None:
    """A link whose larger halves are slower: what is small must not count as disturbed."""
    found = TimingCurve.from_points(
        Point(amount=amount, seconds=7e-4 + amount * (1e-9 if amount < 2**20 else 4e-9)) for amount in AMOUNTS
    )
    assert found.line.fixed_seconds > 2e-4 and found.seconds(0) == pytest.approx(7e-4)


def test_what_a_larger_one_took_less_for_is_shared() -> None:
    pairs = [(1, 1.0), (2, 4.0), (3, 2.0), (4, 5.0)]
    found = TimingCurve.from_points(Point(amount=amount, seconds=seconds) for amount, seconds in pairs)
    assert [point.seconds for point in found.points] == [1.0, 3.0, 3.0, 5.0]


MARK = MachineFingerprint(
    cpu="a cpu", cores=2, torch="2.13.0", gpus=("a gpu",), kernels="default", device="cpu", ranks=2, threads=1
)


def rates(busy: int = 2) -> Rates:
    own = curve()
    return Rates(
        busy=busy, threads=1, products={"fp32": MatmulTimings(square=own, narrow=((4, 4.0), (16, 2.0), (128, 1.0)))},
        attention={"fp32": own}, attention_trained={"fp32": curve(1e-4)}, streams={"add": own},
        optimizers={"adamw": own}, operation_seconds=1e-6, trained_operation_seconds=5e-6,
    )  # fmt: skip


def probe(**other: Any) -> HardwareBenchmark:
    found = HardwareBenchmark(
        fingerprint=MARK, backend="gloo", took_seconds=20.0, rates=(rates(1), rates(2)),
        collectives=tuple(
            CollectiveTimings(kind=kind, ranks=n, curve=curve(n * 1e-4, 1e-9 * SENT_BYTES_PER_BYTE[kind](n)))
            for kind in ("all_reduce", "send") for n in (2, 4)
        ),
        copies={"to_device": curve()}, disk=Disk(folder="/", write_rate=1e8, read_rate=2e8),
    )  # fmt: skip
    return replace(found, **other)


def test_json_there_and_back() -> None:
    for each in (probe(), probe(disk=None, copies={}, collectives=())):
        assert read_probe(json.loads(json.dumps(each.as_json()))) == each


def test_collectives_of_measured_groups_and_of_others() -> None:
    found = probe()
    for ranks in (2, 4):
        wanted = ranks * 1e-4 + 1e-9 * 1e6 * SENT_BYTES_PER_BYTE["all_reduce"](ranks)
        assert found.collective_seconds("all_reduce", num_bytes=1e6, ranks=ranks) == pytest.approx(wanted)
    assert found.collective_seconds("all_reduce", num_bytes=1e6, ranks=1) == 0.0
    told = [found.collective_seconds("all_reduce", num_bytes=1e6, ranks=ranks) for ranks in (2, 3, 4, 8, 64)]
    assert told == sorted(told) and told[-1] < 64 * told[0]
    eight = 7 / 3 * 4e-4 + 1e-9 * 1e6 * SENT_BYTES_PER_BYTE["all_reduce"](8)
    assert told[3] == pytest.approx(eight)
    few = found.collective_seconds("send", num_bytes=1e6, ranks=8)
    assert few == pytest.approx(found.collective_seconds("send", num_bytes=1e6, ranks=4))
    with pytest.raises(MachineError, match="no gather"):
        found.collective_seconds("gather", num_bytes=1, ranks=2)


def test_as_many_busy_as_asked_or_the_next_more() -> None:
    found = probe(rates=(rates(1), rates(2), rates(8)))
    assert [found.rates_for(busy).busy for busy in (1, 2, 3, 8, 9)] == [1, 2, 8, 8, 8]


@pytest.fixture
def home(tmp_path: Path) -> dict[str, str]:
    return {"XDG_CACHE_HOME": str(tmp_path)}


def test_what_was_kept_is_found_again(home: dict[str, str]) -> None:
    assert read_cached_benchmark(MARK, environ=home) is None
    store_benchmark(probe(), environ=home)
    assert read_cached_benchmark(MARK, environ=home) == probe()


@pytest.mark.parametrize(
    "other", [{"torch": "2.14.0"}, {"ranks": 4}, {"cpu": "another"}, {"gpus": ()}, {"kernels": "AVX2"}, {"threads": 2}]
)
def test_another_machine_is_measured_anew(home: dict[str, str], other: dict[str, Any]) -> None:
    store_benchmark(probe(), environ=home)
    mark = replace(MARK, **other)
    assert read_cached_benchmark(mark, environ=home) is None
    copied = cache_file(mark, environ=home)  # also where the file was carried to the other's place
    copied.write_text(cache_file(MARK, environ=home).read_text())
    assert read_cached_benchmark(mark, environ=home) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"format": 1}', '{"format": 0}', "\0\0"])
def test_what_cannot_be_read_is_as_if_it_were_not(home: dict[str, str], text: str) -> None:
    store_benchmark(probe(), environ=home)
    cache_file(MARK, environ=home).write_text(text)
    assert read_cached_benchmark(MARK, environ=home) is None


def test_a_probe_with_wrong_parts_is_as_if_it_were_not(home: dict[str, str]) -> None:
    whole = probe().as_json()
    store_benchmark(probe(), environ=home)
    for name in whole:
        for value in (None, 7, "x", [1], {"a": 1}, []):
            if (name in ("disk", "others") and value is None) or (name == "collectives" and value == []):
                continue
            cache_file(MARK, environ=home).write_text(json.dumps({**whole, name: value}))
            found = read_cached_benchmark(MARK, environ=home)
            number = name in ("took_seconds", "others") and value == 7
            assert found is None or number or name == "backend", (name, value)


def test_what_was_kept_is_read_without_torch(home: dict[str, str]) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from paceline.profiling.machine_benchmarks.machine_benchmark import probe_machine\n"
        "from paceline.profiling.machine_benchmarks.benchmark_cache import machine_fingerprint, read_cached_benchmark\n"
        "assert read_cached_benchmark(machine_fingerprint(ranks=2, device='cpu')) is None\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **home}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    nowhere = {"XDG_CACHE_HOME": str(tmp_path / "file")}
    store_benchmark(probe(), environ=nowhere)
    assert read_cached_benchmark(MARK, environ=nowhere) is None


def test_the_cache_follows_the_user_s_wish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file(MARK, environ={}).parent == tmp_path / ".cache" / "paceline"
    assert cache_file(MARK, environ={"XDG_CACHE_HOME": "not/absolute"}).parent == tmp_path / ".cache" / "paceline"
    assert cache_file(MARK, environ={"XDG_CACHE_HOME": "/else"}).parent == Path("/else/paceline")


def test_the_fingerprint_is_of_here() -> None:
    two = machine_fingerprint(ranks=2, device="cpu")
    assert two == machine_fingerprint(ranks=2, device="cpu") and two.cores >= 1 and two.cpu and two.torch[0].isdigit()
    assert two.gpus == () and machine_fingerprint(ranks=3, device="cpu") != two
    assert machine_fingerprint(ranks=64, device="cpu").threads == 1
    assert machine_fingerprint(ranks=64, device="cpu", ranks_per_node=1).threads == two.cores
