"""Settings of malloc that control whether the C library keeps freed memory."""

import ctypes
import resource
from collections.abc import Mapping

import torch

_MALLOPT_VALUES = (  # parameter and value of mallopt(3)
    (-3, 32 << 20),  # M_MMAP_THRESHOLD
    (-2, 64 << 20),  # M_TOP_PAD
    (-1, -1),  # M_TRIM_THRESHOLD
)
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)


def configure_malloc(environ: Mapping[str, str]) -> bool:
    """Tell the C library to keep freed memory for later allocations.

    The next step on a CPU needs as much memory again, and new pages are expensive. By default glibc returns the end of
    the heap to the system in some processes, whose steps are then a tenth slower. Allocations larger than 32 MiB still
    go back to the system, because they would leave large holes in the heap.

    Return False, and change nothing, in four cases:

    - The environment sets other options of malloc (`MALLOC_*`, `GLIBC_TUNABLES`).
    - The address space is limited (`ulimit`). With these settings, each thread would take 64 MiB of it, used or not.
    - The C library is not glibc.
    - There is a GPU, whose memory malloc does not manage.
    """
    is_configured = any(name.startswith("MALLOC_") for name in environ) or "malloc" in environ.get("GLIBC_TUNABLES", "")
    is_limited = any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in _LIMITS)
    if is_configured or is_limited or torch.accelerator.is_available():
        return False
    try:
        return all(ctypes.CDLL(None).mallopt(name, value) == 1 for name, value in _MALLOPT_VALUES)
    except (OSError, AttributeError):
        return False
