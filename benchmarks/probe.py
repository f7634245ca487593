"""How quick this machine is for so many ranks: products, attention, memory, optimizers, collectives, disk.

    python benchmarks/probe.py --ranks 2              # what was kept of this machine, or measured and kept
    python benchmarks/probe.py --ranks 2 --again      # measured anew
    python benchmarks/probe.py --ranks 2 --check      # measured twice, and one held against the other
    torchrun --nproc-per-node 2 benchmarks/probe.py   # the ranks of a launcher, also on several machines
    python benchmarks/probe.py --line 100mbit         # as root: two ranks in network namespaces, a token bucket between

A number of busy processes, with their threads, is a table of its own: they share memory and caches. `fit` is the worst
distance of a measured point from a line of a fixed time and a rate; what is predicted is read between the points. With
`--check` the second probe's points are held against the first's prediction, and each point of the second against what
its own neighbours say of it.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from sites import ADDRESSES, ENDS, PORT, SPACES, line

from paceline.launch.launcher_variables import detect_world
from paceline.planner.hardware.benchmark_results import HardwareBenchmark, Rates
from paceline.planner.hardware.timing_curve import TimingCurve
from paceline.profiling.machine_benchmarks.machine_benchmark import (
    BENCHMARK_SECONDS,
    BenchmarkRequest,
    probe_joined_world,
    probe_machine,
)

_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def short(value: float, unit: str) -> str:
    """Three digits with a prefix."""
    size, prefix = next(((size, prefix) for size, prefix in _UNITS if value >= size), (1.0, ""))
    return f"{value / size:.3g} {prefix}{unit}"


def seconds(value: float) -> str:
    """In the unit that fits."""
    size, unit = next(((s, u) for s, u in ((1.0, "s"), (1e-3, "ms")) if value >= s), (1e-6, "us"))
    return f"{value / size:.3g} {unit}"


def row(name: str, curve: TimingCurve, unit: str) -> str:
    """A curve: every point's rate."""
    each = "  ".join(f"{short(p.amount, '')}: {short(p.amount / p.seconds, unit)}" for p in curve.points)
    noise = max(point.spread for point in curve.points)
    line = curve.line
    head = f"fixed {seconds(line.fixed_seconds):>8}, {short(line.rate, unit):>10}"
    return f"  {name:<22} {head}, fit {line.residual:5.0%}, noise {noise:4.0%} | {each}"


def rates(own: Rates) -> Iterator[str]:
    """One table."""
    yield f"{own.busy} busy, {own.threads} threads each"
    for name, products in own.products.items():
        yield row(f"product {name}", products.square, "FLOP/s")
        yield f"  {'narrow ' + name:<22} " + "  ".join(f"{n}: {slow:.2f} x" for n, slow in products.narrow)
    for title, curves in (("attention", own.attention), ("and backward", own.attention_trained)):
        yield from (row(f"{title} {name}", curve, "FLOP/s") for name, curve in curves.items())
    yield from (row(name, curve, "B/s") for name, curve in (own.streams | own.optimizers).items())
    yield f"  an operation {seconds(own.operation_seconds)}, with its backward {seconds(own.trained_operation_seconds)}"


def table(probe: HardwareBenchmark) -> str:
    """All of it."""
    mark = probe.fingerprint
    lines = [
        f"{mark.ranks} ranks, {mark.device}, {mark.cpu}, {mark.cores} cores, torch {mark.torch}, {mark.kernels} kernels"
    ]
    lines += [", ".join(mark.gpus)] if mark.gpus else []
    for own in probe.rates:
        lines += list(rates(own))
    for each in probe.collectives:
        leaves = f", {short(8 * each.line_rate, 'bit/s')} leave a rank"
        lines.append(row(f"{each.kind} of {each.ranks}", each.curve, "B/s") + leaves)
    lines += [row(way, curve, "B/s") for way, curve in probe.copies.items()]
    if probe.disk is not None:
        lines.append(f"disk: {short(probe.disk.write_rate, 'B/s')} written, {short(probe.disk.read_rate, 'B/s')} read")
    lines.append(f"measured in {probe.took_seconds:.1f} s, backend {probe.backend}")
    if not probe.is_quiet:
        lines.append(f"others used {probe.others:.0%} of the cores just before: these figures are too low")
    return "\n".join(lines)


def all_curves(probe: HardwareBenchmark) -> dict[str, TimingCurve]:
    """By a name of their own."""
    found = {f"{each.kind} {each.ranks}": each.curve for each in probe.collectives}
    for own in probe.rates:
        products = {name: each.square for name, each in own.products.items()}
        for kinds in (products, own.attention, own.attention_trained, own.streams, own.optimizers):
            found |= {f"{own.busy} {len(found)} {name}": curve for name, curve in kinds.items()}
    return found


def ratios(first: HardwareBenchmark, second: HardwareBenchmark) -> Iterator[tuple[float, float | None]]:
    """Of each point: by what the other probe predicts, and by what its neighbours do."""
    others = all_curves(first)
    for name, curve in all_curves(second).items():
        for at, point in enumerate(curve.points):
            left = [each for each in curve.points if each is not point]
            inner = 0 < at < len(curve.points) - 1
            between = TimingCurve.from_points(left).seconds(point.amount) / point.seconds if inner else None
            if name in others:
                yield others[name].seconds(point.amount) / point.seconds, between


def check(first: HardwareBenchmark, second: HardwareBenchmark) -> str:
    """How far off they are, in words."""
    pairs = list(ratios(first, second))
    lines = []
    for title, found in (
        ("predicted by the probe before", [one for one, _ in pairs]),
        ("predicted by the neighbours", [other for _, other in pairs if other is not None]),
    ):
        off = sorted(max(ratio, 1 / ratio) - 1 for ratio in found)
        lines.append(f"{title}: {len(off)} points, middle {off[len(off) // 2]:.1%}, worst {off[-1]:.0%}")
    return "\n".join(lines)


def over_line(rate: str, words: Sequence[str]) -> int:
    """The same command in two namespaces."""
    with line(rate):
        ranks = []
        for rank in (0, 1):
            own = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
            own |= {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(PORT), "GLOO_SOCKET_IFNAME": ENDS[rank]}
            command = ["ip", "netns", "exec", SPACES[rank], sys.executable, "-W", "ignore", __file__, *words]
            ranks.append(subprocess.Popen(command, env=os.environ | own))
        return max(rank.wait() for rank in ranks)


def main() -> int:
    """Print the table, or the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--seconds", type=float, default=BENCHMARK_SECONDS)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="whose disk is tried")
    parser.add_argument("--again", action="store_true", help="measure, whatever is kept")
    parser.add_argument("--check", action="store_true", help="measure twice")
    parser.add_argument("--line", help="as 100mbit: what two namespaces are joined by")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    own = BenchmarkRequest(seconds=asked.seconds, folder=asked.folder)
    joined = detect_world(os.environ)
    if asked.line is not None and joined is None:
        return over_line(asked.line, sys.argv[1:])
    if joined is not None:
        probe = probe_joined_world(joined, device=asked.device, request=own)
    else:
        probe = probe_machine(ranks=asked.ranks, device=asked.device, request=own, refresh=asked.again)
    if probe is not None:
        print(json.dumps(probe.as_json(), indent=1) if asked.json else table(probe))
    if asked.check and probe is not None and joined is None:
        print(check(probe, probe_machine(ranks=asked.ranks, device=asked.device, request=own, refresh=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
