"""Get the benchmark (probe) of this machine for a number of ranks: the cached one, or a new one."""

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.console.formatting import plural
from paceline.errors import ExitCode, MachineError
from paceline.filesystem.atomic_files import read_json
from paceline.filesystem.temporary_folders import scratch_folder
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.launcher_variables import JoinedWorld
from paceline.launch.rendezvous import adopt_launcher_variables
from paceline.launch.run_outcome import failure_screen
from paceline.planner.hardware.benchmark_results import HardwareBenchmark, MachineFingerprint, read_probe
from paceline.planner.layout.host_resources import busy_fraction
from paceline.plugins import resolve
from paceline.profiling.machine_benchmarks.benchmark_cache import (
    machine_fingerprint,
    read_cached_benchmark,
    store_benchmark,
)
from paceline.run_folder.run_folder import ROOT, RunFolder

ENTRY = "paceline.profiling.machine_benchmarks.benchmark_worker:run_benchmarks"
BENCHMARK_SECONDS = 20.0
_START_SECONDS = 5.0  # to start processes and import torch
_MIN_MEASURING_SHARE = 0.6  # of the total seconds, however long the start takes


@dataclass(frozen=True, kw_only=True)
class BenchmarkRequest:
    """The parameters of a benchmark: its total seconds, including the start, and the folder whose disk is measured."""

    seconds: float = BENCHMARK_SECONDS
    folder: Path = ROOT

    def payload(self, fingerprint: MachineFingerprint, *, answer: Path, ranks_per_node: int) -> dict[str, Any]:
        """Return the payload for the benchmark's ranks. `answer` is the file that rank 0 writes."""
        return {
            "seconds": max(self.seconds - _START_SECONDS, _MIN_MEASURING_SHARE * self.seconds),
            "folder": str(self.folder.absolute()),
            "fingerprint": asdict(fingerprint),
            "answer": str(answer),
            "ranks_per_node": ranks_per_node,
        }


def probe_machine(
    *, ranks: int, device: str = "cpu", request: BenchmarkRequest | None = None, refresh: bool = False
) -> HardwareBenchmark:
    """Return the cached benchmark for this machine, torch and number of ranks. Measure a new one if there is none.

    New processes measure the new benchmark, which is then cached. A cached benchmark is measured again with `refresh`,
    or if other programs disturbed it and the machine is quiet now.

    Raises:
        MachineError: the processes did not start, or failed.
    """
    fingerprint = machine_fingerprint(ranks=ranks, device=device)
    cached = None if refresh else read_cached_benchmark(fingerprint)
    if cached is not None and cached.is_quiet:
        return cached
    if cached is not None and not replace(cached, others=busy_fraction()).is_quiet:
        return cached
    probe = _run_benchmark(fingerprint, request or BenchmarkRequest())
    store_benchmark(probe)
    return probe


def _run_benchmark(fingerprint: MachineFingerprint, benchmark_request: BenchmarkRequest) -> HardwareBenchmark:
    with scratch_folder("probe") as scratch:
        answer = scratch.path / "answer.json"
        payload = benchmark_request.payload(fingerprint, answer=answer, ranks_per_node=fingerprint.ranks)
        request = LaunchRequest(
            ranks=fingerprint.ranks,
            run=RunFolder(scratch.path),
            entry=ENTRY,
            payload=payload,
            threads=fingerprint.threads,
            saves_checkpoints=False,
        )
        outcome = start(request)
        if outcome.exit_code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if outcome.exit_code or not answer.exists():
            raise MachineError(
                f"the machine benchmark of {plural(fingerprint.ranks, 'rank')} on {fingerprint.device} failed.",
                cause=failure_screen(outcome),
                hint="--ranks 1 shows whether one rank works",
            )
        return read_probe(read_json(answer))


def probe_joined_world(
    joined: JoinedWorld, *, device: str = "cpu", request: BenchmarkRequest | None = None
) -> HardwareBenchmark | None:
    """Measure this machine with the processes that a launcher has started, and cache nothing.

    Every rank calls this. Return the benchmark on rank 0, and None on the others.

    Raises:
        PacelineError: this process or another one failed.
    """
    adopt_launcher_variables(joined, os.environ)
    ranks_per_node = joined.local_world_size
    fingerprint = machine_fingerprint(ranks=joined.world_size, device=device, ranks_per_node=ranks_per_node)
    with scratch_folder("probe") as scratch:
        answer = scratch.path / "answer.json"
        payload = (request or BenchmarkRequest()).payload(fingerprint, answer=answer, ranks_per_node=ranks_per_node)
        rank_outcome = resolve("paceline.launch.agent.worker_process:run_joined")(
            ENTRY, payload, threads=fingerprint.threads
        )
        if rank_outcome.error is not None:
            raise rank_outcome.error
        return read_probe(read_json(answer)) if answer.exists() else None
