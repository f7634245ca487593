"""What each rank runs for a probe; rank 0 writes what all have found."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError, raise_all
from paceline.measure.backends import built_in
from paceline.measure.probe.compute import measure_compute, measure_copies
from paceline.measure.probe.disk import measure_disk
from paceline.measure.probe.links import measure_links
from paceline.plan.probed import Disk, Fingerprint, Probe, Rates
from paceline.plan.settle import Cluster, Facts, settle_backend, settle_threads
from paceline.store.disk import write_json
from paceline.world import Place, World

TIMEOUT_SECONDS = 120.0
_LINKS, _COPIES, _DISK = 0.25, 0.1, 0.05  # of the seconds that there are; the rest is for what ranks compute


def measure(payload: Mapping[str, Any]) -> int:
    """Within `payload["seconds"]`, more or less; the answer is a `Probe`'s JSON at `payload["answer"]`."""
    mark = payload["fingerprint"]
    mark = Fingerprint(**{**mark, "gpus": tuple(mark["gpus"])})
    world = _join(mark)
    try:
        probe = _probe(world, mark, payload)
        if world.is_main:
            write_json(Path(payload["answer"]), probe.as_json())
        world.barrier()
    finally:
        world.close()
    return 0


def levels(*, ranks: int, cores: int, device: str) -> list[tuple[int, int]]:
    """Busy processes of a machine, and the threads that each has, as a run of so many would.

    Of several ranks one may also compute while the others wait, with the threads that it has then.
    """
    if device == "cuda":
        numbers = {1, ranks}
    else:
        numbers = {2**power for power in range(ranks.bit_length()) if 2**power <= ranks} | {ranks}
    found = {
        number: settle_threads(cluster=Cluster(ranks=number, cores=cores), one=False, asked=None) for number in numbers
    }
    return sorted({*found.items(), (1, found[ranks])})


def _join(mark: Fingerprint) -> World:
    problems: list[PacelineError] = []
    facts = Facts(global_batch_size=1, built_in=built_in())
    backend, _ = settle_backend(Cluster(ranks=mark.ranks, device=mark.device), facts, problems)
    raise_all(problems)
    place = Place.read(os.environ)
    return World.join(place=place, device_type=mark.device, backend=backend, timeout_seconds=TIMEOUT_SECONDS)


def _probe(world: World, mark: Fingerprint, payload: Mapping[str, Any]) -> Probe:
    began, seconds = time.perf_counter(), float(payload["seconds"])
    links = _LINKS * (world.world_size > 1)
    copies = _COPIES * (world.device.type == "cuda")
    compute = _rates(world, mark, payload, seconds=seconds * (1 - links - copies - _DISK))
    collectives = measure_links(world, seconds=seconds * links)
    found = measure_copies(world, seconds=seconds * copies)
    disk: Disk | None = measure_disk(world, folder=Path(payload["folder"]), seconds=seconds * _DISK)
    return Probe(
        fingerprint=mark,
        backend=world.backend,
        took_seconds=time.perf_counter() - began,
        rates=compute,
        collectives=collectives,
        copies=found,
        disk=disk,
    )


def _rates(world: World, mark: Fingerprint, payload: Mapping[str, Any], *, seconds: float) -> tuple[Rates, ...]:
    """Level by level; rank 0 is busy in all of them. Ranks of a machine are neighbours."""
    local = int(payload["ranks_per_node"])
    wanted = levels(ranks=local, cores=mark.cores, device=mark.device)
    found = []
    for busy, threads in wanted:
        ranks = [rank for rank in range(world.world_size) if rank % local < busy]
        others = [[rank] for rank in range(world.world_size) if rank not in ranks]
        part = world.part([ranks, *others])
        if world.rank in ranks:
            found.append(measure_compute(part, busy=busy, threads=threads, seconds=seconds / len(wanted)))
        world.barrier()
    return tuple(found)
