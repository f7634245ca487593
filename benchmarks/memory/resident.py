"""What the kernel says this process has in memory, in bytes: resident now, and the most since it was last asked."""

import re
from pathlib import Path

_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_now() -> int:
    """With what it shares with the process that it was forked from."""
    return _read("VmRSS")


def resident_most() -> int:
    """Since `forget_most`, or since it began."""
    return _read("VmHWM")


def forget_most() -> bool:
    """Begin a new most; False where the kernel does not allow it, and the most stays that of the whole life."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True


def _read(name: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"no {name} in {_STATUS}: resident memory is measured on Linux only")
    return int(found[1]) * 1024
