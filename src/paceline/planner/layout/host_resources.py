"""Detect this machine's CPUs and GPUs without torch."""

import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

_SMI_SECONDS = 20
_IDLE_COLUMN = 3  # in the first line of /proc/stat
_GPUS = Path("/proc/driver/nvidia/gpus")
_GPU_ID = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")  # CUDA ignores the first entry that does not match, and all after it
_DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd")


def usable_cores() -> int:
    """Return the number of cores that this process may use, by its CPU affinity and the quota of its control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cpu_quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, min(cores, quota) if quota else cores)


def visible_gpus(*, folder: Path = _GPUS, driver_files: Sequence[str] = _DRIVER_FILES) -> int:
    """Return the number of GPUs that this process may use, without initializing CUDA.

    `folder` has an entry for each installed GPU. If `folder` is missing, any of the `driver_files` proves that there is
    a driver; CUDA_VISIBLE_DEVICES then gives the number of GPUs.
    """
    num_installed = len(list(folder.iterdir())) if folder.is_dir() else None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return num_installed or 0
    if num_installed is None and not any(Path(file).exists() for file in driver_files):
        return 0
    num_listed = len(list(takewhile(_GPU_ID.fullmatch, (part.strip() for part in visible.split(",")))))
    return (
        num_listed
        if num_installed is None
        else min(num_listed, max(num_installed, num_listed if "MIG-" in visible else 0))
    )


def cpu_name() -> str:
    """Return the CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def gpu_models() -> tuple[str, ...]:
    """Return the sorted model names of this machine's GPUs, without initializing CUDA; empty if none is visible."""
    if not visible_gpus():
        return ()
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    model_lines = [line for file in files for line in file.read_text().splitlines() if line.startswith("Model:")]
    return tuple(sorted(line.partition(":")[2].strip() for line in model_lines)) or _query_gpu_names()


def gpu_memory() -> int | None:
    """Return the memory of the smallest GPU in bytes; None if nvidia-smi does not report it."""
    sizes_text = [text.partition(" ")[0] for text in _query_nvidia_smi("memory.total")]
    sizes = [int(text) << 20 for text in sizes_text if text.isdecimal()]
    return min(sizes) if sizes else None


def _query_gpu_names() -> tuple[str, ...]:
    return tuple(sorted(_query_nvidia_smi("name"))) or ("unknown",)


def _query_nvidia_smi(field: str) -> list[str]:
    """Return what nvidia-smi prints for this field, one line for each GPU; empty if nvidia-smi fails."""
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return [*filter(None, map(str.strip, result.stdout.splitlines()))]


def busy_fraction(*, seconds: float = 0.3) -> float:
    """Measure for `seconds` which fraction of all cores is busy, and return it; return 0 if it is unknown."""
    before = _ticks()
    time.sleep(seconds)
    elapsed = [after - first for first, after in zip(before, _ticks(), strict=False)]
    total = float(sum(elapsed))
    return 1 - elapsed[_IDLE_COLUMN] / total if total and len(elapsed) > _IDLE_COLUMN else 0.0


def _ticks() -> list[int]:
    """Return the clock ticks of all cores since boot, in the order of /proc/stat: user, nice, system, idle, ..."""
    try:
        return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return []


def _cpu_quota(path: Path) -> int | None:
    """Return the quota of a control group in cores, rounded down but at least 1; None if there is no quota."""
    try:
        limit, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(1, int(limit) // int(period))
