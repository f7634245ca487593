"""Settings of malloc that control whether the C library keeps freed memory."""

import ctypes
import resource
from collections.abc import Mapping

import torch

_MALLOPT_VALUES = (
    (-3, 32 << 20),
    (-2, 64 << 20),
    (-1, -1),
)  # mallopt(3): M_MMAP_THRESHOLD, M_TOP_PAD, M_TRIM_THRESHOLD
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)


def configure_malloc(environ: Mapping[str, str]) -> bool:
    """Tell the C library to keep freed memory: a CPU's next step allocates the same again, and new pages are expensive.

    By default glibc returns the end of the heap in some processes and not in others; where it does, a step is a tenth
    slower. Allocations larger than 32 MiB still come from the system each time, because keeping them would waste memory
    in holes. Return False if the environment sets other options (`MALLOC_*`, `GLIBC_TUNABLES`), if the address space is
    limited (`ulimit`: each thread now takes 64 MiB of it, used or not), with another C library, and with a GPU, whose
    memory malloc does not manage.
    """
    is_configured = any(name.startswith("MALLOC_") for name in environ) or "malloc" in environ.get("GLIBC_TUNABLES", "")
    is_limited = any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in _LIMITS)
    if is_configured or is_limited or torch.accelerator.is_available():
        return False
    try:
        return all(ctypes.CDLL(None).mallopt(name, value) == 1 for name, value in _MALLOPT_VALUES)
    except (OSError, AttributeError):
        return False
