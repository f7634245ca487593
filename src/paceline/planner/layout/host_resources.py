"""Detection of this machine's CPUs and GPUs without torch."""

import os
import platform
import re
import subprocess
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

_SMI_SECONDS = 20
_IDLE = 3
_GPUS = Path("/proc/driver/nvidia/gpus")
_GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")  # CUDA stops reading at the first other word
_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd")


def usable_cores() -> int:
    """Return the cores this process may use: its affinity, limited by the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, min(cores, quota) if quota else cores)


def visible_gpus(*, folder: Path = _GPUS, drivers: Sequence[str] = _DRIVERS) -> int:
    """Return how many GPUs this process may use, without starting CUDA."""
    there = len(list(folder.iterdir())) if folder.is_dir() else None
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is None:
        return there or 0
    if there is None and not any(Path(file).exists() for file in drivers):
        return 0
    named = len(list(takewhile(_GPU.fullmatch, (part.strip() for part in asked.split(",")))))
    return named if there is None else min(named, max(there, named if "MIG-" in asked else 0))


def cpu_name() -> str:
    """Return the CPU's model name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def gpu_models() -> tuple[str, ...]:
    """Return the model names of all GPUs of this machine, sorted, without starting CUDA; empty if none is visible."""
    if not visible_gpus():
        return ()
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    told = [line for file in files for line in file.read_text().splitlines() if line.startswith("Model:")]
    return tuple(sorted(line.partition(":")[2].strip() for line in told)) or _told_by_smi()


def gpu_memory() -> int | None:
    """Return the bytes of the smallest visible GPU, from its driver; None if the driver does not say."""
    told = [text.partition(" ")[0] for text in _asked_of_smi("memory.total")]
    sizes = [int(text) << 20 for text in told if text.isdecimal()]
    return min(sizes) if sizes else None


def _told_by_smi() -> tuple[str, ...]:
    return tuple(sorted(_asked_of_smi("name"))) or ("unknown",)


def _asked_of_smi(what: str) -> list[str]:
    """Return nvidia-smi's answer, one line for each GPU."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return [*filter(None, map(str.strip, done.stdout.splitlines()))]


def busy_share(*, seconds: float = 0.3) -> float:
    """Return the fraction of all cores that is in use, measured over a moment; 0 if it is unknown."""
    before = _ticks()
    time.sleep(seconds)
    passed = [after - first for first, after in zip(before, _ticks(), strict=False)]
    total = float(sum(passed))
    return 1 - passed[_IDLE] / total if total and len(passed) > _IDLE else 0.0


def _ticks() -> list[int]:
    """Return the clock ticks of all cores since the start, by kind of use (Linux, proc(5))."""
    try:
        return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except (OSError, ValueError, IndexError):
        return []


def _quota(path: Path) -> int | None:
    try:
        limit, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(1, int(limit) // int(period))
