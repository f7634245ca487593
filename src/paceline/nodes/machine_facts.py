"""The facts of a machine before a training, by which the machines of a run are compared."""

import importlib.metadata
import os
import platform
import resource
import shutil
import socket
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import msgspec

from paceline.nodes.network_interfaces import Interface, address_towards, list_interfaces, resolve_host

_VARIABLE_PREFIXES = ("NCCL_", "TORCH_", "GLOO_DEVICE", "MKL_", "CUBLAS_", "OMP_")
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_VECTOR_UNITS = (("avx512f", "AVX-512"), ("avx2", "AVX2"))  # the widest first; they choose the kernels


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of one machine. Sizes are in bytes."""

    host: str
    address: str
    """Its own address on the route to the head; empty if it has none."""
    interface: str
    """The interface with this address."""
    interfaces: tuple[Interface, ...]
    host_address: str
    """What its own name resolves to; empty if to nothing."""
    python: str
    packages: dict[str, str]
    """The version of each installed package."""
    code: dict[str, str]
    """A digest of each file that the user named, such as the job."""
    data: dict[str, str]
    """A digest of the names and sizes of the files in each data folder."""
    variables: dict[str, str]
    """The environment variables that change how torch computes or sends."""
    interface_variables: dict[str, str]
    """GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if they are set."""
    vector_unit: str
    gpus: tuple[str, ...]
    """The model of each NVIDIA GPU."""
    gpu_driver: str
    cores: int
    free_shared_memory: int
    free_disk: int
    """Free space where the run folder is."""
    open_files: int
    """The number of files that a process may open."""
    run_folder_problem: str
    """Why the run folder can't be written; empty if it can."""

    @property
    def mtu(self) -> int:
        """The size of the largest packet of `interface`; 0 if unknown."""
        return next((interface.mtu for interface in self.interfaces if interface.name == self.interface), 0)


def read_machine_facts(
    *, head_host: str, run_folder: Path, code: Mapping[str, Path], data: Mapping[str, Path]
) -> MachineFacts:
    """Return the facts of this machine. `code` and `data` have paths by the names that all nodes have for them.

    The run folder is created, to find out whether it can be written.
    """
    host, address, interfaces = socket.gethostname(), address_towards(head_host), list_interfaces()
    return MachineFacts(
        host=host,
        address=address,
        interface=next((interface.name for interface in interfaces if interface.address == address), ""),
        interfaces=tuple(interfaces),
        host_address=resolve_host(host),
        python=platform.python_version(),
        packages=_package_versions(),
        code={name: _file_digest(path) for name, path in code.items()},
        data={name: _folder_digest(path) for name, path in data.items()},
        variables={name: value for name, value in os.environ.items() if (name.startswith(_VARIABLE_PREFIXES)
                   and name not in _INTERFACE_VARIABLES) or name == "PYTHONHASHSEED"},
        interface_variables={name: os.environ[name] for name in _INTERFACE_VARIABLES if os.environ.get(name)},
        vector_unit=_vector_unit(),
        gpus=_gpus(),
        gpu_driver=_gpu_driver(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        free_shared_memory=_free_bytes(Path("/dev/shm")),
        free_disk=_free_bytes(run_folder),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        run_folder_problem=_write_problem(run_folder),
    )  # fmt: skip


def _package_versions() -> dict[str, str]:
    """Return the version of each package, by its normalized name. Of two with one name, Python imports the first."""
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower().replace("_", "-")
        if name:
            versions.setdefault(name, distribution.version)
    return versions


def _file_digest(path: Path) -> str:
    try:
        return sha256(path.read_bytes()).hexdigest()[:12]
    except OSError as error:
        return f"can't be read ({error.strerror})"


def _folder_digest(path: Path) -> str:
    """Return a digest of the relative path and the size of each file; the contents are not read."""
    if not path.exists():
        return "missing"
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    lines = [f"{file.relative_to(path.parent)} {file.stat().st_size}" for file in files]
    return f"{len(files)} files, {sha256(chr(10).join(lines).encode()).hexdigest()[:12]}"


def _vector_unit() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    except OSError:
        return platform.machine()
    return next((name for flag, name in _VECTOR_UNITS if flag in flags), platform.machine())


def _gpus() -> tuple[str, ...]:
    """Return the models of the NVIDIA GPUs, from the driver's own files."""
    models = []
    for path in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        lines = path.read_text().splitlines()
        models.append(next((line.partition(":")[2].strip() for line in lines if line.startswith("Model")), "unknown"))
    return tuple(models)


def _gpu_driver() -> str:
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return ""
    return next((word for word in words if word[0].isdigit() and "." in word), "")


def _free_bytes(path: Path) -> int:
    """Return the free space at the path, or at its nearest folder that exists; -1 if it is not known."""
    existing = next((folder for folder in (path, *path.absolute().parents) if folder.exists()), None)
    try:
        return shutil.disk_usage(existing).free if existing is not None else -1
    except OSError:
        return -1


def _write_problem(folder: Path) -> str:
    probe = folder / f".paceline-write-{socket.gethostname()}-{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.write_text("x")
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""
