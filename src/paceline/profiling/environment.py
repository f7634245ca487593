"""Record the environment of a run: the facts that may explain a difference between two runs."""

import hashlib
import os
import platform
import socket
import subprocess
import sys
import sysconfig
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from paceline.config.job_reference import parse_jobref
from paceline.errors import PacelineError
from paceline.filesystem.atomic_files import read_regular
from paceline.planner.layout.host_resources import cpu_name, usable_cores

_PACKAGES = (
    "paceline", "torch", "numpy", "safetensors", "transformers", "tokenizers", "datasets", "scikit-learn",
    "torchvision", "torchmetrics", "accelerate", "lightning", "deepspeed", "triton", "wandb", "tensorboard",
)  # fmt: skip
_VARIABLES = ("OMP_NUM_THREADS", "MKL_CBWR", "CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_GIT_SECONDS = 5
_LOGGING_PACKAGES = ("wandb", "tensorboard")
_MAIN_MODULES = ("__main__", "__mp_main__")
_PATHS = sysconfig.get_paths()
_INSTALLED_PREFIXES = (
    *(_PATHS[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")),
    str(Path(__file__).parents[1]),
)


def environment(job: str = "") -> dict[str, Any]:
    """Return versions, hardware, the job's file and commit, and the few environment variables that change results.

    Other environment variables are not recorded, because they may contain keys and passwords.
    """
    versions = {name: _version(name) for name in _PACKAGES}
    return {
        "job": code_facts(job),
        "python": platform.python_version(),
        "packages": {name: found for name, found in versions.items() if found is not None},
        "torch_build": torch_build(),
        "os": platform.platform(),
        "host": socket.gethostname(),
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "threads": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "gpus": gpu_names(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    }


def code_facts(job: str) -> dict[str, Any]:
    """Return facts about the code of a job's training: the job's file, the user's loaded modules, library versions."""
    versions = {
        name: found for name in _PACKAGES if name not in _LOGGING_PACKAGES and (found := _version(name)) is not None
    }
    return {**job_facts(job), "modules": loaded_modules(), "torch_build": torch_build(), "packages": versions}


def loaded_modules() -> dict[str, str]:
    """Return the file digests of the user's loaded modules: those outside Python, Paceline and installed packages."""
    digests = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and name not in _MAIN_MODULES and not _is_installed(file):
            with suppress(OSError, ValueError):
                digests[name] = hashlib.sha256(read_regular(Path(file))).hexdigest()
    return digests


def _is_installed(file: str) -> bool:
    """Return whether a file belongs to Python, Paceline or an installed package."""
    return file.startswith(_INSTALLED_PREFIXES) or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def job_facts(job: str) -> dict[str, Any]:
    """Return a job's file, its digest, the git commit of its folder, and whether files differ from that commit."""
    file = _job_file(job)
    folder = file.parent if file is not None else Path.cwd()
    commit = _git(folder, "rev-parse", "HEAD")
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no") if commit is not None else None
    return {
        "file": file.name if file is not None else None,
        "digest": hashlib.sha256(file.read_bytes()).hexdigest() if file is not None else None,
        "git_commit": commit,
        "git_dirty": None if changed is None else bool(changed),
    }


def _job_file(job: str) -> Path | None:
    """Return a job's file, or the script that was started if there is no job file. Return None if neither exists."""
    try:
        ref = parse_jobref(job)
        spec = find_spec(ref.module) if ref.module else None
        job_file = ref.path or (spec.origin if spec else None)
    except (PacelineError, ImportError, ValueError):
        job_file = None
    for path in (job_file, sys.argv[0]):
        if path and str(path).endswith(".py") and Path(path).is_file():
            return Path(path).resolve()
    return None


def _git(folder: Path, *arguments: str) -> str | None:
    """Return git's output, or None if git is missing or slow, or the folder is not in a repository."""
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return completed.stdout.strip() if completed.returncode == 0 else None


def torch_build() -> str:
    """Return torch's version, including its build variant."""
    return str(torch.__version__)


def gpu_names() -> list[str]:
    """Return the names of the GPUs; empty if CUDA is not initialised."""
    if not torch.cuda.is_initialized():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
