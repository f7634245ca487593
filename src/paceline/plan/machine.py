"""What this machine offers, found without torch."""

import os
from pathlib import Path


def usable_cores() -> int:
    """Cores this process may use: affinity, then the control group's quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _quota(Path("/sys/fs/cgroup/cpu.max"))
    return max(1, min(cores, quota) if quota else cores)


def visible_gpus() -> int:
    """GPUs this process may use, without starting CUDA."""
    asked = os.environ.get("CUDA_VISIBLE_DEVICES")
    if asked is not None:
        return len([part for part in asked.split(",") if part.strip() not in ("", "-1")])
    folder = Path("/proc/driver/nvidia/gpus")
    return len(list(folder.iterdir())) if folder.is_dir() else 0


def _quota(path: Path) -> int | None:
    try:
        limit, period = path.read_text().split()
    except (OSError, ValueError):
        return None
    return None if limit == "max" else max(1, int(limit) // int(period))
