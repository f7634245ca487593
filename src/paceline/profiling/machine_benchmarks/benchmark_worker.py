"""The worker of a machine benchmark. Each rank runs it, and rank 0 writes the combined result."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.comm.process_group import LaunchInfo, World
from paceline.errors import PacelineError, raise_all
from paceline.filesystem.atomic_files import write_json
from paceline.planner.hardware.benchmark_results import HardwareBenchmark, MachineFingerprint, Rates
from paceline.planner.layout.execution_plan import JobFacts, Resources, choose_backend, choose_threads
from paceline.profiling.backends import available_backends
from paceline.profiling.cpu_contention import CpuTimes, max_cpu_contention, read_cpu_times
from paceline.profiling.machine_benchmarks.collective_benchmarks import measure_links
from paceline.profiling.machine_benchmarks.compute_benchmarks import measure_compute, measure_copies
from paceline.profiling.machine_benchmarks.disk_benchmark import measure_disk

TIMEOUT_SECONDS = 120.0
_LINKS_SHARE, _COPIES_SHARE, _DISK_SHARE = 0.25, 0.1, 0.05  # of the time limit; the rest is for the compute rates
_MIN_SECONDS = 0.2


def run_benchmarks(payload: Mapping[str, Any]) -> int:
    """Measure for about `payload["seconds"]`, and write the `HardwareBenchmark` as JSON to `payload["answer"]`."""
    fingerprint = payload["fingerprint"]
    fingerprint = MachineFingerprint(**{**fingerprint, "gpus": tuple(fingerprint["gpus"])})
    world = _join_world(fingerprint)
    try:
        probe = probe_world(
            world,
            fingerprint,
            seconds=float(payload["seconds"]),
            folder=Path(payload["folder"]),
            ranks_per_node=int(payload["ranks_per_node"]),
        )
        if world.is_main:
            write_json(Path(payload["answer"]), probe.as_json())
        world.barrier()
    finally:
        world.close()
    return 0


def load_levels(*, ranks: int, cores: int, device: str) -> list[tuple[int, int]]:
    """Return (number of busy processes, threads of each process) for each load to measure.

    The threads are as many as a run with this number of processes has.
    """
    if device == "cuda":
        numbers = {1, ranks}
    else:
        numbers = {2**power for power in range(ranks.bit_length()) if 2**power <= ranks} | {ranks}
    return [
        (num_busy, choose_threads(resources=Resources(ranks=num_busy, cores=cores), one_thread=False, requested=None))
        for num_busy in sorted(numbers)
    ]


def _join_world(fingerprint: MachineFingerprint) -> World:
    problems: list[PacelineError] = []
    facts = JobFacts(global_batch_size=1, built_in_backends=available_backends())
    backend, _ = choose_backend(Resources(ranks=fingerprint.ranks, device=fingerprint.device), facts, problems)
    raise_all(problems)
    launch_info = LaunchInfo.read(os.environ)
    return World.join(
        launch_info=launch_info, device_type=fingerprint.device, backend=backend, timeout_seconds=TIMEOUT_SECONDS
    )


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """A time budget that is divided among measurements, each of which gets a share of the time that is still left."""

    world: World
    end_time: float

    def seconds_for(self, share: float, *, total: float) -> float:
        """Return the seconds for a measurement with this share, equal on all ranks.

        `total` is the sum of the shares of this measurement and all later ones.
        """
        remaining = float(self.world.share_json(self.end_time - time.perf_counter()))
        return max(remaining, _MIN_SECONDS) * share / total


def probe_world(
    world: World, fingerprint: MachineFingerprint, *, seconds: float, folder: Path, ranks_per_node: int
) -> HardwareBenchmark:
    """Return the benchmark that all ranks of a world measure together within about `seconds`. Every rank calls this."""
    start_time, cpu_readings = time.perf_counter(), [read_cpu_times()]
    budget = TimeBudget(world=world, end_time=start_time + seconds)
    links_share, copies_share = _LINKS_SHARE * (world.world_size > 1), _COPIES_SHARE * (world.device.type == "cuda")
    shares_cores = ranks_per_node > fingerprint.cores
    collectives = measure_links(world, seconds=budget.seconds_for(links_share, total=1), shares_cores=shares_cores)
    cpu_readings.append(read_cpu_times())
    copies = measure_copies(world, seconds=budget.seconds_for(copies_share, total=1 - links_share))
    disk = measure_disk(
        world, folder=folder, seconds=budget.seconds_for(_DISK_SHARE, total=1 - links_share - copies_share)
    )
    threads = torch.get_num_threads()
    try:
        rates = _measure_rates(budget, fingerprint, ranks_per_node, cpu_readings)
    finally:
        torch.set_num_threads(threads)  # layouts may be timed in the same process
    return HardwareBenchmark(
        fingerprint=fingerprint,
        backend=world.backend,
        took_seconds=time.perf_counter() - start_time,
        rates=rates,
        collectives=collectives,
        copies=copies,
        disk=disk,
        others=max_cpu_contention(cpu_readings, world),
    )


def _measure_rates(
    budget: TimeBudget, fingerprint: MachineFingerprint, ranks_per_node: int, cpu_readings: list[CpuTimes]
) -> tuple[Rates, ...]:
    """Return the compute rates for each number of busy ranks per machine, and append to `cpu_readings`.

    Each machine has `ranks_per_node` consecutive ranks. The first ranks of a machine are busy, and the others wait. So
    rank 0 is always busy and returns all rates. Another rank returns only the rates for which it was busy.
    """
    world, rates = budget.world, []
    ranks_per_node, levels = world.share_json(
        [ranks_per_node, load_levels(ranks=ranks_per_node, cores=fingerprint.cores, device=fingerprint.device)]
    )
    for number, (busy, threads) in enumerate(levels):
        seconds = budget.seconds_for(1, total=len(levels) - number)
        ranks = [rank for rank in range(world.world_size) if rank % ranks_per_node < busy]
        cpu_readings.append(read_cpu_times())
        subgroup = world.subgroup([ranks, *([rank] for rank in range(world.world_size) if rank not in ranks)])
        if world.rank in ranks:
            shares_cores = busy * threads > fingerprint.cores
            rates.append(
                measure_compute(subgroup, num_busy=busy, threads=threads, seconds=seconds, shares_cores=shares_cores)
            )
        world.barrier()
    cpu_readings.append(read_cpu_times())
    return tuple(rates)
