"""What a C library does with memory that was freed."""

import ctypes
import resource
from collections.abc import Mapping

import torch

_KEPT = ((-3, 32 << 20), (-2, 64 << 20), (-1, -1))  # mallopt(3): M_MMAP_THRESHOLD, M_TOP_PAD, M_TRIM_THRESHOLD
_LIMITS = (resource.RLIMIT_AS, resource.RLIMIT_DATA)


def configure_malloc(environ: Mapping[str, str]) -> bool:
    """Tell the C library to keep what is freed: a CPU's next step takes the same again, and new pages are dear.

    Whether glibc gives the heap's end back differs from process to process; where it does, a step is a tenth slower.
    What is larger than 32 MiB comes from the system each time, as without this: kept, holes would be wasted. False
    where it was told otherwise (`MALLOC_*`, `GLIBC_TUNABLES`), where addresses are limited (`ulimit`: each thread now
    has 64 MiB of them, used or not), where it is another library, and with a GPU, whose memory this is not.
    """
    told = any(name.startswith("MALLOC_") for name in environ) or "malloc" in environ.get("GLIBC_TUNABLES", "")
    limited = any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit in _LIMITS)
    if told or limited or torch.accelerator.is_available():
        return False
    try:
        return all(ctypes.CDLL(None).mallopt(name, value) == 1 for name, value in _KEPT)
    except (OSError, AttributeError):
        return False
