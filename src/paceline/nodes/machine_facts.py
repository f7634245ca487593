"""The facts of a machine before a training, by which the machines of a run are compared."""

import ast
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import sys
import tokenize
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path

import msgspec

from paceline.nodes.network_interfaces import (
    Interface,
    address_towards,
    interface_name,
    is_own_address,
    list_interfaces,
    resolve_host,
)

COMPARED_VARIABLES = (
    "ATEN_CPU_CAPABILITY", "CUBLAS_WORKSPACE_CONFIG", "GLOO_DEVICE_TRANSPORT", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS",
    "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CROSS_NIC", "NCCL_IB_DISABLE", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS",
    "NCCL_NET", "NCCL_NTHREADS", "NCCL_P2P_DISABLE", "NCCL_PROTO", "NCCL_SHM_DISABLE", "NVIDIA_TF32_OVERRIDE",
    "PYTHONHASHSEED", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_USE_COMM_NONBLOCKING",
)  # fmt: skip
"""The environment variables that change the bits of a result, or how ranks talk to each other."""
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_VECTOR_UNITS = (("avx512f", "AVX-512"), ("avx2", "AVX2"))  # the widest first; they choose the kernels
_GPU_FOLDER = Path("/proc/driver/nvidia")
_MAX_CODE_FILES = 200
UNKNOWN = -1
MISSING, UNREADABLE = "missing", "can't be read"
RUN_FOLDER_OPTION = "run folder"
"""The name of the run folder among the options of a command."""


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one machine. Sizes are in bytes, and -1 if unknown."""

    host: str
    address: str
    """Its own address on the route to the head; empty if it has none."""
    interfaces: tuple[Interface, ...]
    host_address: str
    """What its own name resolves to; empty if to nothing."""
    is_host_address_own: bool
    python: str
    packages: dict[str, str]
    """The version of each installed package."""
    code: dict[str, str]
    """A digest of each Python file that the user named, the job first, and of those beside it."""
    data: dict[str, str]
    """A digest of the names and sizes of the files in each data folder."""
    command: dict[str, str]
    """The options and settings of a training that all nodes should have in common."""
    variables: dict[str, str]
    """The variables of `COMPARED_VARIABLES` that are set."""
    interface_variables: dict[str, str]
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if they are set."""
    vector_unit: str
    gpus: str
    """The NVIDIA GPUs, such as "8 x NVIDIA H100"; empty without any."""
    gpu_driver: str
    cores: int
    free_shared_memory: int
    free_disk: int
    """Free space where the run folder is."""
    open_files: int
    """The number of files that a process may open."""
    imported: dict[str, str] = {}
    """A digest of each Python file in the job's folder that the job imports, by its path there."""
    verb: str = ""
    """The command that was typed, such as "paceline train"."""

    @property
    def interface(self) -> str:
        """The interface with `address`; empty if unknown."""
        return interface_name(self.address, self.interfaces)

    @property
    def mtu(self) -> int:
        """The size of the largest packet of `interface`; 0 if unknown, or if it is the loopback interface."""
        return next((each.mtu for each in self.interfaces if each.name == self.interface and not each.is_loopback), 0)


def read_machine_facts(
    *,
    head_host: str,
    run_folder: Path,
    code: Mapping[str, Path],
    data: Mapping[str, Path],
    command: Mapping[str, str] | None = None,
    verb: str = "",
) -> MachineFacts:
    """Return the facts of this machine. `code` and `data` have paths by the names that all nodes have for them.

    The first file of `code` is the job.
    """
    host = socket.gethostname()
    host_address = resolve_host(host)
    return MachineFacts(
        host=host,
        address=address_towards(head_host),
        interfaces=tuple(list_interfaces()),
        host_address=host_address,
        is_host_address_own=bool(host_address) and is_own_address(host_address),
        python=platform.python_version(),
        packages=_package_versions(),
        code={name: _file_digest(path) for name, path in code.items()},
        imported={name: _file_digest(path) for path in list(code.values())[:1] for name, path in imported_files(path)},
        verb=verb,
        data={name: _folder_digest(path) for name, path in data.items()},
        command=dict(command or {}),
        variables={name: os.environ[name] for name in COMPARED_VARIABLES if name in os.environ},
        interface_variables={name: os.environ[name] for name in _INTERFACE_VARIABLES if os.environ.get(name)},
        vector_unit=_vector_unit(),
        gpus=_gpus(),
        gpu_driver=_gpu_driver(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        free_shared_memory=_free_bytes(Path("/dev/shm")) if Path("/dev/shm").is_dir() else UNKNOWN,
        free_disk=_free_bytes(run_folder),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0] if sys.platform == "linux" else UNKNOWN,
    )


def code_files(job: str | None) -> dict[str, Path]:
    """Return the job's file, which may be missing, and the other Python files of its folder; none for a module."""
    path = Path((job or "").partition(":")[0])
    if path.suffix != ".py":
        return {}
    others = [file for file in sorted(path.parent.glob("*.py"))[:_MAX_CODE_FILES] if file.is_file()]
    return {file.name: file for file in [path, *others]}


def imported_files(job: Path) -> list[tuple[str, Path]]:
    """Return the files in the folder of a job that it imports, or that these import, with their paths in the folder.

    The files are only read. What they import by other means than an `import` statement is left out.
    """
    folder, found, remaining = job.parent, dict[str, Path](), [job]
    while remaining and len(found) < _MAX_CODE_FILES:
        for module in _imported_modules(remaining.pop(), folder):
            for name in _files_of_module(module):
                file = folder / name
                if name not in found and file != job and file.is_file():
                    found[name] = file
                    remaining.append(file)
    return sorted(found.items())


def _imported_modules(path: Path, folder: Path) -> list[tuple[str, ...]]:
    """Return the names of the modules that a file may import, in parts; none if it is not Python."""
    try:
        with tokenize.open(path) as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    modules: list[tuple[str, ...]] = []
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            modules += [tuple(alias.name.split(".")) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            own = path.parent.relative_to(folder).parts if statement.level else ()
            package = (*own[: len(own) + 1 - statement.level], *(statement.module or "").split("."))
            base = tuple(part for part in package if part)
            modules += [(*base, alias.name) for alias in statement.names]  # a name in it, or a module
    return modules


def _files_of_module(module: Sequence[str]) -> list[str]:
    """Return the files that Python may read for a module and the packages around it, relative to the folder."""
    prefixes = ["/".join(module[:length]) for length in range(1, len(module) + 1)]
    return [name for prefix in prefixes for name in (f"{prefix}.py", f"{prefix}/__init__.py")]


def _package_versions() -> dict[str, str]:
    """Return the version of each package, by its normalized name. Of two with one name, Python imports the first."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name:
            versions.setdefault(name, distribution.version or "unknown")
    return versions


def _file_digest(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()[:12]
    except FileNotFoundError:
        return MISSING
    except OSError as error:
        return f"{UNREADABLE} ({error.strerror})"


def _folder_digest(path: Path) -> str:
    """Return a digest of the relative path and the size of each file; the contents are not read."""
    try:
        if path.is_file():
            return f"{path.stat().st_size} bytes"
        files = sorted(entry for entry in path.rglob("*") if entry.is_file())
        lines = [os.fsencode(file.relative_to(path)) + f" {file.stat().st_size}".encode() for file in files]
        digest = sha256(b"\n".join(lines)).hexdigest()[:12]
        return f"{len(files)} files, {digest}" if path.is_dir() else MISSING
    except OSError as error:
        return f"{UNREADABLE} ({error.strerror})"


def _vector_unit() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    except OSError:
        return platform.machine()
    return next((name for flag, name in _VECTOR_UNITS if flag in flags), platform.machine())


def _gpus() -> str:
    """Return the number of NVIDIA GPUs of each model, from the driver's own files."""
    models: Counter[str] = Counter()
    for path in _GPU_FOLDER.glob("gpus/*/information"):
        lines = path.read_text().splitlines()
        models[next((line.partition(":")[2].strip() for line in lines if line.startswith("Model")), "unknown")] += 1
    return ", ".join(f"{count} x {model}" for model, count in sorted(models.items()))


def _gpu_driver() -> str:
    try:
        words = (_GPU_FOLDER / "version").read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def _free_bytes(path: Path) -> int:
    """Return the free space at the path, or at its nearest folder that exists."""
    try:
        return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free
    except (OSError, StopIteration):
        return UNKNOWN
