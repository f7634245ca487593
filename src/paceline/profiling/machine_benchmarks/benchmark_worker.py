"""The worker of a machine benchmark, which each rank runs; rank 0 writes the combined result."""

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
from paceline.planner.hardware.benchmark_results import Fingerprint, HardwareBenchmark, Rates
from paceline.planner.layout.execution_plan import JobFacts, Resources, choose_backend, choose_threads
from paceline.profiling.backends import available_backends
from paceline.profiling.cpu_contention import CpuTimes, most_of_others, read_cpu_times
from paceline.profiling.machine_benchmarks.collective_benchmarks import measure_links
from paceline.profiling.machine_benchmarks.compute_benchmarks import measure_compute, measure_copies
from paceline.profiling.machine_benchmarks.disk_benchmark import measure_disk

TIMEOUT_SECONDS = 120.0
_LINKS, _COPIES, _DISK = 0.25, 0.1, 0.05  # shares of the time limit; the rest is for the compute rates
_LEAST_SECONDS = 0.2


def measure(payload: Mapping[str, Any]) -> int:
    """Measure for about `payload["seconds"]`, and write the `HardwareBenchmark` as JSON to `payload["answer"]`."""
    mark = payload["fingerprint"]
    mark = Fingerprint(**{**mark, "gpus": tuple(mark["gpus"])})
    world = _join(mark)
    try:
        probe = probe_world(
            world,
            mark,
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
    """Return the numbers of busy processes to measure, with the threads of each as in a run. Each rank has its GPU."""
    if device == "cuda":
        numbers = {1, ranks}
    else:
        numbers = {2**power for power in range(ranks.bit_length()) if 2**power <= ranks} | {ranks}
    return [
        (number, choose_threads(cluster=Resources(ranks=number, cores=cores), one_thread=False, requested=None))
        for number in sorted(numbers)
    ]


def _join(mark: Fingerprint) -> World:
    problems: list[PacelineError] = []
    facts = JobFacts(global_batch_size=1, built_in_backends=available_backends())
    backend, _ = choose_backend(Resources(ranks=mark.ranks, device=mark.device), facts, problems)
    raise_all(problems)
    place = LaunchInfo.read(os.environ)
    return World.join(place=place, device_type=mark.device, backend=backend, timeout_seconds=TIMEOUT_SECONDS)


@dataclass(frozen=True, kw_only=True)
class TimeBudget:
    """A time budget: each part gets its share of the time that the earlier parts left."""

    world: World
    ends: float

    def share(self, part: float, *, of: float) -> float:
        """Return the seconds for a part; `total` is the share of this and all later parts. All ranks get the same."""
        left = float(self.world.share_json(self.ends - time.perf_counter()))
        return max(left, _LEAST_SECONDS) * part / of


def probe_world(
    world: World, mark: Fingerprint, *, seconds: float, folder: Path, ranks_per_node: int
) -> HardwareBenchmark:
    """Return what all ranks of a world measure together within about `seconds`. Every rank calls this."""
    began, looks = time.perf_counter(), [read_cpu_times()]
    purse = TimeBudget(world=world, ends=began + seconds)
    links, copies = _LINKS * (world.world_size > 1), _COPIES * (world.device.type == "cuda")
    crowded = ranks_per_node > mark.cores
    collectives = measure_links(world, seconds=purse.share(links, of=1), crowded=crowded)
    looks.append(read_cpu_times())
    found = measure_copies(world, seconds=purse.share(copies, of=1 - links))
    disk = measure_disk(world, folder=folder, seconds=purse.share(_DISK, of=1 - links - copies))
    threads = torch.get_num_threads()
    try:
        rates = _rates(purse, mark, ranks_per_node, looks)
    finally:
        torch.set_num_threads(threads)  # layouts may be timed in the same process
    return HardwareBenchmark(
        fingerprint=mark,
        backend=world.backend,
        took_seconds=time.perf_counter() - began,
        rates=rates,
        collectives=collectives,
        copies=found,
        disk=disk,
        others=most_of_others(looks, world),
    )


def _rates(purse: TimeBudget, mark: Fingerprint, local: int, looks: list[CpuTimes]) -> tuple[Rates, ...]:
    """Return the compute rates for each number of busy ranks, and add CPU readings; rank 0 is always busy.

    Each machine has `ranks_per_node` consecutive ranks.
    """
    world, found = purse.world, []
    local, wanted = world.share_json([local, load_levels(ranks=local, cores=mark.cores, device=mark.device)])
    for number, (busy, threads) in enumerate(wanted):
        seconds = purse.share(1, of=len(wanted) - number)
        ranks = [rank for rank in range(world.world_size) if rank % local < busy]
        looks.append(read_cpu_times())
        part = world.part([ranks, *([rank] for rank in range(world.world_size) if rank not in ranks)])
        if world.rank in ranks:
            crowded = busy * threads > mark.cores
            found.append(measure_compute(part, busy=busy, threads=threads, seconds=seconds, crowded=crowded))
        world.barrier()
    looks.append(read_cpu_times())
    return tuple(found)
