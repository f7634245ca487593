"""Describe this process's machine as a cluster to plan for, from the cached benchmark or a new one."""

import time
from dataclasses import dataclass, replace

from paceline.planner.hardware.benchmark_results import HardwareBenchmark
from paceline.planner.hardware.cluster import Cluster
from paceline.planner.hardware.local_cluster import available_memory, measured_cluster
from paceline.profiling.calibration_store import median_forecast_ratios
from paceline.profiling.machine_benchmarks.benchmark_cache import machine_fingerprint, read_cached_benchmark
from paceline.profiling.machine_benchmarks.machine_benchmark import probe_machine


@dataclass(frozen=True, kw_only=True)
class LocalMachine:
    """This machine as a cluster. `seconds` is the time of the new benchmark, or 0 if the cached one was used."""

    cluster: Cluster
    seconds: float


def benchmark_local_machine(*, ranks: int, device: str) -> LocalMachine:
    """Return this machine as a cluster of `ranks`, measured now if no valid benchmark is cached.

    Raises:
        MachineError: the benchmark failed, or the memory of its GPUs is unknown.
    """
    start_time = time.monotonic()
    cached = read_cached_benchmark(machine_fingerprint(ranks=ranks, device=device))
    probe = probe_machine(ranks=ranks, device=device)  # a new one if other programs disturbed the cached one
    return LocalMachine(
        cluster=_make_cluster(probe, ranks, device), seconds=0.0 if probe == cached else time.monotonic() - start_time
    )


def cached_local_cluster(*, ranks: int, device: str) -> Cluster | None:
    """Return this machine as a cluster if a benchmark is cached, else None. Measure nothing."""
    probe = read_cached_benchmark(machine_fingerprint(ranks=ranks, device=device))
    return None if probe is None else _make_cluster(probe, ranks, device)


def _make_cluster(probe: HardwareBenchmark, ranks: int, device: str) -> Cluster:
    longer, fuller = median_forecast_ratios(probe.fingerprint)
    return replace(
        measured_cluster(probe, ranks=ranks, memory_bytes=available_memory(device)), longer=longer, fuller=fuller
    )
