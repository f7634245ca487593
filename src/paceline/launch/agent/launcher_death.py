"""Parent-death signals: ranks die with a killed launcher, so that none continues to train in the run folder."""

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.launch.agent.signals import PR_GET_PDEATHSIG, PR_SET_PDEATHSIG, die_with_parent

_MPI_PROGRAMS = {"mpirun", "mpiexec", "orterun", "prterun", "orted", "prted", "mpiexec.hydra", "hydra_pmi_proxy"}


def die_with_launcher(environ: Mapping[str, str]) -> int | None:
    """Ask the kernel to kill this rank when the process that launched it dies.

    This is done only if that process is torchrun, or has the name of an MPI program. Another parent, such as a
    shell that started this process in the background, may end while the run should continue.

    Returns:
        The previous parent-death signal (0 if none), which `outlive_launcher` restores; None if nothing was changed.
    """
    parent = launcher_pid(environ)
    if sys.platform != "linux" or parent is None:
        return None
    previous_signal = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(previous_signal))
    die_with_parent(parent)
    return previous_signal.value


def launcher_pid(environ: Mapping[str, str]) -> int | None:
    """Return the parent process if it is torchrun, or has the name of an MPI program; else None."""
    parent = os.getppid()
    return parent if "TORCHELASTIC_RUN_ID" in environ or _program_name(parent) in _MPI_PROGRAMS else None


def outlive_launcher(previous_signal: int) -> None:
    """Restore the parent-death signal of the time before `die_with_launcher`, because the run is over."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, previous_signal)


def _program_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
