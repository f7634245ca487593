"""The cache of this machine's benchmarks, one for each fingerprint. An unreadable benchmark is ignored."""

import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from paceline.filesystem.atomic_files import read_json, write_json
from paceline.launch.launch_environment import kernel_fingerprint
from paceline.planner.hardware.benchmark_results import HardwareBenchmark, MachineFingerprint, read_probe
from paceline.planner.layout.execution_plan import Resources, choose_threads
from paceline.planner.layout.host_resources import cpu_name, gpu_models, usable_cores


def machine_fingerprint(*, ranks: int, device: str, ranks_per_node: int | None = None) -> MachineFingerprint:
    """Return the fingerprint of this machine for `ranks` processes, without importing torch."""
    cores = usable_cores()
    cluster = Resources(ranks=ranks, cores=cores, ranks_per_node=ranks_per_node)
    return MachineFingerprint(
        cpu=cpu_name(),
        cores=cores,
        torch=version("torch"),
        gpus=gpu_models() if device == "cuda" else (),
        kernels=kernel_fingerprint(),  # the numerical kernels that the environment variable MKL_CBWR selects
        device=device,
        ranks=ranks,
        threads=choose_threads(resources=cluster, one_thread=False, requested=None),
    )


def cache_folder(*, environ: Mapping[str, str] = os.environ) -> Path:
    """Return `$XDG_CACHE_HOME/paceline`, or `~/.cache/paceline` if that variable is not an absolute path.

    For a user without a home folder, such as a bare user id in a container, return a folder in the temporary directory.
    """
    xdg_cache_home = Path(environ.get("XDG_CACHE_HOME", ""))
    if xdg_cache_home.is_absolute():
        return xdg_cache_home / "paceline"
    try:
        return Path.home() / ".cache" / "paceline"
    except RuntimeError:
        return Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}" / "cache"


def cache_file(fingerprint: MachineFingerprint, *, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file for the benchmark with this fingerprint."""
    digest = hashlib.sha256(json.dumps(asdict(fingerprint), sort_keys=True).encode()).hexdigest()[:12]
    return cache_folder(environ=environ) / f"probe-{fingerprint.device}-{fingerprint.ranks}-{digest}.json"


def read_cached_benchmark(
    fingerprint: MachineFingerprint, *, environ: Mapping[str, str] = os.environ
) -> HardwareBenchmark | None:
    """Return the stored benchmark with exactly this fingerprint, or None."""
    try:
        benchmark = read_probe(read_json(cache_file(fingerprint, environ=environ)))
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return benchmark if benchmark.fingerprint == fingerprint else None


def store_benchmark(probe: HardwareBenchmark, *, environ: Mapping[str, str] = os.environ) -> None:
    """Store a benchmark. Store nothing if the folder can't be written."""
    with suppress(OSError, RuntimeError):
        file = cache_file(probe.fingerprint, environ=environ)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, probe.as_json())
