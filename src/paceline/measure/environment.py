"""Where a run took place: the facts that may explain a difference."""

import os
import platform
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from paceline.plan.machine import usable_cores

_PACKAGES = ("paceline", "torch", "numpy", "safetensors", "transformers", "scikit-learn")
_VARIABLES = ("OMP_NUM_THREADS", "MKL_CBWR", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def environment() -> dict[str, Any]:
    """Versions, processor, memory and the few variables that change results; nothing secret."""
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "torch_build": torch.__version__,
        "os": platform.platform(),
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpu_names(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def cpu_name() -> str:
    """The kind of CPU, as its maker calls it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def gpu_names() -> list[str]:
    """The GPUs, if CUDA was started."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
