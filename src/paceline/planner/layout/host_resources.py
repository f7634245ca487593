"""What this machine offers, found without torch."""

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
_GPU = re.compile(r"\d+|(GPU|MIG)-[\w/-]+")  # CUDA's own reading ends at the first other word
_DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvgpu", "/dev/kfd")


def usable_cores() -> int:
    """Cores this process may use: affinity, then the control group's quota."""
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
    """The kind of CPU, as its maker calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def gpu_models() -> tuple[str, ...]:
    """The kinds of all GPUs of this machine, sorted, without starting CUDA; empty where none is visible."""
    if not visible_gpus():
        return ()
    files = Path("/proc/driver/nvidia/gpus").glob("*/information")
    told = [line for file in files for line in file.read_text().splitlines() if line.startswith("Model:")]
    return tuple(sorted(line.partition(":")[2].strip() for line in told)) or _told_by_smi()


def gpu_memory() -> int | None:
    """Bytes of the smallest visible GPU, as its driver tells; None where it does not."""
    told = [text.partition(" ")[0] for text in _asked_of_smi("memory.total")]
    sizes = [int(text) << 20 for text in told if text.isdecimal()]
    return min(sizes) if sizes else None


def _told_by_smi() -> tuple[str, ...]:
    return tuple(sorted(_asked_of_smi("name"))) or ("unknown",)


def _asked_of_smi(what: str) -> list[str]:
    """A line of each GPU."""
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMI_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return []
    return [*filter(None, map(str.strip, done.stdout.splitlines()))]


def busy_share(*, seconds: float = 0.3) -> float:
    """How much of all cores is in use, as seen over a moment; nothing where it can't be known."""
    before = _ticks()
    time.sleep(seconds)
    passed = [after - first for first, after in zip(before, _ticks(), strict=False)]
    total = float(sum(passed))
    return 1 - passed[_IDLE] / total if total and len(passed) > _IDLE else 0.0


def _ticks() -> list[int]:
    """Of all cores since the start, by what they did: Linux, proc(5)."""
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
