"""Out-of-memory detection: recognises the errors, and finds the phase of the step and the limit that was hit."""

import ctypes
import errno
import gc
import os
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from paceline.console.formatting import format_size
from paceline.errors import DataError, OutOfMemory

_OOM_TEXTS = ("can't allocate memory", "cannot allocate memory", "bad_alloc", "out of memory")
_ALLOCATION = re.compile(r"(?:allocate|allocating) ([\d.]+) (bytes|[KMGTPE]iB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40, "pib": 1 << 50, "eib": 1 << 60}
_PHASES = (  # by the file of the outermost frame in torch
    ("/torch/autograd/", "backward"),
    ("/torch/optim/", "optimizer"),
    ("/torch/nn/utils/", "optimizer"),
    ("/torch/nn/", "forward"),
)
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_PROCESS_CGROUPS = Path("/proc/self/cgroup")
_STATUS_NAMES = {"address space": "VmSize", "data": "VmData"}
_NO_LIMIT = 1 << 60  # cgroup v1 reports a number near 2^63 if there is no limit


@dataclass(frozen=True, kw_only=True)
class MemoryLimit:
    """A memory limit and the bytes that count towards it. `is_own`: only bytes of this process count."""

    name: str
    limit_bytes: int
    used_bytes: int
    is_own: bool = False


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error means that device or host memory ran out."""
    if isinstance(error, MemoryError | OutOfMemory) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError | DataError) and any(word in str(error).lower() for word in _OOM_TEXTS)


def requested_bytes(error: BaseException) -> int | None:
    """Return the size of the failed allocation in bytes, or None if the error does not contain it."""
    match = _ALLOCATION.search(str(error))
    return None if match is None else int(float(match[1]) * _UNITS[match[2].lower()])


def phase_of(trace: TracebackType | None) -> str:
    """Return the phase of a step that a traceback is in: `forward`, `backward`, `optimizer`, or an empty string."""
    while trace is not None:
        file = trace.tb_frame.f_code.co_filename
        phase = next((part for folder, part in _PHASES if folder in file), "")
        if phase:
            return phase
        trace = trace.tb_next
    return ""


def out_of_memory_error(
    error: BaseException, *, phase: str = "", held: Mapping[str, int], limit: MemoryLimit | None
) -> OutOfMemory:
    """Return the error as `OutOfMemory`, with its traceback and notes; `held` is the memory in use, by purpose."""
    phase = "reading data" if isinstance(error, DataError) else phase or phase_of(error.__traceback__)
    allocation_bytes = requested_bytes(error)
    message = "out of memory" + (f" in {phase}" if phase else "")
    message += f": {format_size(allocation_bytes)} more could not be allocated." if allocation_bytes else "."
    limit_text = (
        ""
        if limit is None
        else f"{limit.name} is limited to {format_size(limit.limit_bytes)}, {format_size(limit.used_bytes)} were used"
    )
    oom_error = OutOfMemory(
        message,
        cause=limit_text,
        bytes_by_purpose=held,
        limit_bytes=None if limit is None else limit.limit_bytes,
        part=phase,
        requested_bytes=allocation_bytes,
    )
    oom_error.__notes__ = list(getattr(error, "__notes__", ()))
    return oom_error.with_traceback(error.__traceback__)


def process_memory(name: str = "VmRSS") -> int:
    """Return a memory size of this process in bytes, by its name in proc(5); 0 on systems without it.

    `VmRSS` is the resident memory, `VmSize` the address space, `VmData` the data segment.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, StopIteration):
        return 0


def release_freed_memory() -> None:
    """Return freed memory to the system and reset the peak of resident memory.

    Nothing happens if the kernel or the C library does not support it.
    """
    gc.collect()
    trim_heap()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


@contextmanager
def freeze_existing_objects() -> Iterator[None]:
    """Exclude existing objects from garbage collection inside the block.

    With torch loaded there are about a million of them, and each collection would take 0.2 s. This context manager is
    also a decorator.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def trim_heap() -> None:
    """Return freed heap memory to the system, if the C library supports it."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def tightest_memory_limit() -> MemoryLimit | None:
    """Return the limit on this process's memory that leaves the least free, or None if there is no limit."""
    return min(_memory_limits(), key=lambda limit: limit.limit_bytes - limit.used_bytes, default=None)


def tightest_shared_limit() -> MemoryLimit | None:
    """Return the limit on the memory of several processes that leaves the least free, or None if there is no limit."""
    limits = [limit for limit in _memory_limits() if not limit.is_own]
    return min(limits, key=lambda limit: limit.limit_bytes - limit.used_bytes, default=None)


def process_bytes_under(limit: MemoryLimit | None) -> int:
    """Return the bytes of this process that count towards a limit."""
    if limit is not None and limit.is_own:
        return limit.used_bytes
    return process_memory()


def _memory_limits() -> Iterator[MemoryLimit]:
    """Yield the limits on this process's memory: ulimit, control groups, and the memory of the machine."""
    for name, limit in (("address space", resource.RLIMIT_AS), ("data", resource.RLIMIT_DATA)):
        limit_bytes = resource.getrlimit(limit)[0]
        if limit_bytes != resource.RLIM_INFINITY:
            process_bytes = process_memory(_STATUS_NAMES[name])
            yield MemoryLimit(
                name=f"this process's {name} (ulimit)", limit_bytes=limit_bytes, used_bytes=process_bytes, is_own=True
            )
    for folder in _cgroup_folders():
        for limit_file, usage_file in (
            ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):  # fmt: skip
            with suppress(OSError, ValueError):
                limit_bytes, used_bytes = (int((folder / file).read_text()) for file in (limit_file, usage_file))
                used_bytes -= _reclaimable_bytes(folder / "memory.stat")
                if limit_bytes < _NO_LIMIT:
                    yield MemoryLimit(name="the control group's memory", limit_bytes=limit_bytes, used_bytes=used_bytes)
    with suppress(OSError, ValueError, KeyError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in lines)}
        total = sizes["MemTotal"]
        yield MemoryLimit(name="this machine's memory", limit_bytes=total, used_bytes=total - sizes["MemAvailable"])


def _reclaimable_bytes(statistics: Path) -> int:
    """Return the bytes of old files in a control group's memory, which the kernel drops when it needs memory."""
    with suppress(OSError, ValueError):
        sizes = dict(line.split() for line in statistics.read_text().splitlines())
        return int(sizes.get("total_inactive_file") or sizes.get("inactive_file") or 0)  # cgroup v1 has both
    return 0


def oom_kill_count(
    *, cgroup_root: Path = _CGROUP_ROOT, machine: Path = Path("/proc/vmstat"), process_cgroups: Path = _PROCESS_CGROUPS
) -> int | None:
    """Return a count that grows when the kernel kills a process because memory runs out; None if unknown.

    It is the sum of the counts of this process's control group and its parent groups, because each of them may set the
    limit. With cgroup v2, the count of a parent includes those of its children, so one kill may add more than 1 to the
    sum. If no group reports a count, that of the whole machine is returned.
    """
    for name in ("memory.events", "memory.oom_control"):
        counts = [
            count
            for folder in _cgroup_folders(cgroup_root, process_cgroups)
            if (count := _read_oom_kills(folder / name)) is not None
        ]
        if counts:
            return sum(counts)
    return _read_oom_kills(machine)


def _read_oom_kills(file: Path) -> int | None:
    with suppress(OSError, ValueError, StopIteration):
        lines = file.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    return None


def _cgroup_folders(cgroup_root: Path = _CGROUP_ROOT, process_cgroups: Path = _PROCESS_CGROUPS) -> list[Path]:
    """Return the folders of the control groups that limit this process's memory, the innermost first."""
    folders = []
    try:
        lines = process_cgroups.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers == "" or "memory" in controllers.split(","):
            root = cgroup_root if controllers == "" else cgroup_root / "memory"
            group = Path(path.lstrip("/"))
            folders += [root / part for part in (group, *group.parents) if part != Path()]
    return [*folders, cgroup_root, cgroup_root / "memory"]


def explain_data_worker_error(text: str) -> tuple[str, str] | None:
    """Return the cause and the remedy if data workers ran out of open files or shared memory.

    The argument is the text of an error. Return None if the text shows another reason. If it is about shared memory but
    does not say that no space was left, also return None if /dev/shm has enough free space now.
    """
    lowered = text.lower()
    if files := explain_open_files(text):
        return f"{files[0]}; each tensor from a data worker needs one", "ulimit -n 65536, or --data.workers 0"
    if any(word in lowered for word in _SHARED_MEMORY_TEXTS):
        free, total = _shared_memory_bytes()
        was_full = _DISK_FULL_TEXT in lowered
        if was_full or (total and free < _LOW_SHARED_MEMORY_BYTES):
            cause = "/dev/shm was full" if was_full else "/dev/shm is small"
            cause += ", the shared memory through which data workers pass samples"
            cause += f": {format_size(free)} of {format_size(total)} are free now" if total else ""
            return cause, _LARGER_SHARED_MEMORY
    return None


def explain_lock_error(error: BaseException) -> tuple[str, str] | None:
    """Return the cause and the remedy if no semaphore or lock of data workers can be created in /dev/shm."""
    number = getattr(error, "errno", None)
    if number == errno.ENOSPC:
        free, total = _shared_memory_bytes()
        size = f": {format_size(free)} of {format_size(total)} are free now" if total else ""
        return f"/dev/shm was full, in which data workers create their locks{size}", _LARGER_SHARED_MEMORY
    if number in (errno.EROFS, errno.EACCES) and not os.access("/dev/shm", os.W_OK):
        cause = "/dev/shm can't be written, in which data workers create their locks"
        return cause, "mount -o remount,rw /dev/shm, or --data.workers 0"
    return None


def explain_open_files(text: str) -> tuple[str, str] | None:
    """Return the cause and the remedy if the text of an error says that too many files are open."""
    if not any(word in text.lower() for word in _OPEN_FILES_TEXTS):
        return None
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"a process may open {limit:,} files here (`ulimit -n`)", "ulimit -n 4096"


def _shared_memory_bytes() -> tuple[int, int]:
    """Return the free and the total bytes of /dev/shm; zeros if it does not exist."""
    try:
        stats = os.statvfs("/dev/shm")
    except OSError:
        return 0, 0
    return stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize


_LARGER_SHARED_MEMORY = (
    "a larger /dev/shm (docker run --shm-size 8g, or mount -o remount,size=8g /dev/shm), or --data.workers 0"
)
_DISK_FULL_TEXT = "no space left on device"
_LOW_SHARED_MEMORY_BYTES = 1 << 30
"""With more free bytes than this, a bus error or a failed mapping has another reason than a full /dev/shm."""
_OPEN_FILES_TEXTS = ("too many open files", "items of ancdata", "[errno 24]")
_SHARED_MEMORY_TEXTS = ("out of shared memory", "bus error", "unable to mmap", "shared memory object", "file </torch_")
