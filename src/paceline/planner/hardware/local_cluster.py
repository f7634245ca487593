"""Describe this machine as a cluster to plan for: one device per rank, and the link between them, from a probe."""

from pathlib import Path

from paceline.errors import MachineError
from paceline.planner.hardware.benchmark_results import HardwareBenchmark
from paceline.planner.hardware.catalog import sheet_rates
from paceline.planner.hardware.cluster import Cluster, Device, Link
from paceline.planner.layout.host_resources import gpu_memory

_UNUSED_LINK_RATE = 1e15  # bytes per second of a link that is never used
RESERVE_BYTES = {"cpu": 420 << 20, "cuda": 2 << 30}
"""The bytes that a process needs after `import torch`, before it has a model, by type of device."""


def measured_cluster(probe: HardwareBenchmark, *, ranks: int, memory_bytes: float) -> Cluster:
    """Return this machine as a cluster. `memory_bytes` are those of one GPU, or the total that all CPU ranks share."""
    rates, fingerprint = probe.rates_for(ranks), probe.fingerprint
    is_cpu = fingerprint.device == "cpu"
    flops = {name: products.square.best_rate for name, products in rates.products.items()}
    device = Device(
        name=fingerprint.cpu if is_cpu else fingerprint.gpus[0],
        kind=fingerprint.device,
        memory_bytes=memory_bytes / ranks if is_cpu else memory_bytes,
        flops_per_second=flops,
        bytes_per_second=rates.streams["add"].best_rate,
        reserve_bytes=RESERVE_BYTES["cpu" if is_cpu else "cuda"],
        source="measured here",
        peaks={} if is_cpu else sheet_rates(fingerprint.gpus[0]),
    )
    link = _link(probe, ranks)
    host = Link(name="memory", latency_seconds=0.0, bytes_per_second=rates.streams["copy"].best_rate, origin="measured")
    return Cluster(device=device, devices=ranks, inside=link, between=link, host=host, name="here")


def _link(probe: HardwareBenchmark, ranks: int) -> Link:
    """Return the link between two ranks, from the time of a ring all-reduce over n ranks.

    The all-reduce has 2 (n - 1) steps, each with 1/n of the bytes.
    """
    if ranks == 1:
        return Link(name="none", latency_seconds=0.0, bytes_per_second=_UNUSED_LINK_RATE, origin="measured")
    small, large = 1 << 10, 16 << 20
    small_seconds = probe.collective_seconds("all_reduce", num_bytes=small, ranks=ranks)
    large_seconds = probe.collective_seconds("all_reduce", num_bytes=large, ranks=ranks)
    rate = 2 * (ranks - 1) / ranks * (large - small) / max(large_seconds - small_seconds, 1e-9)
    return Link(
        name="all-reduce",
        latency_seconds=small_seconds / (2 * (ranks - 1)),
        bytes_per_second=rate,
        source="measured here",
        origin="measured",
    )


def available_memory(device: str) -> int:
    """Return the memory of one GPU or, for CPUs, the memory that all ranks of this machine share.

    Raises:
        MachineError: the driver does not report the memory of the GPUs.
    """
    if device == "cpu":
        return host_memory()
    num_bytes = gpu_memory()
    if num_bytes is None:
        raise MachineError(
            "nvidia-smi does not report the GPUs' memory.",
            hint="--cluster FILE.toml with memory = ..., or --device cpu",
        )
    return num_bytes


def host_memory() -> int:
    """Return the memory of this machine in bytes, or the limit of this process's control group if it is lower."""
    limits = [_total_memory()]
    for path in (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")):
        try:
            limits.append(int(path.read_text()))
        except (OSError, ValueError):
            continue
    return min(limits)


def _total_memory() -> int:
    """Return the memory of this machine by /proc/meminfo; 16 GiB if that file has none."""
    try:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    except (OSError, StopIteration):
        return 16 << 30
    return int(line.split()[1]) << 10
