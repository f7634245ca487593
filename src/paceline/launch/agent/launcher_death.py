"""A launcher that is killed can not end its ranks, so they end with it: no rank trains on in the run's folder."""

import ctypes
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.launch.agent.signals import die_with

_PROGRAMS = {"mpirun", "mpiexec", "orterun", "prterun", "orted", "prted", "mpiexec.hydra", "hydra_pmi_proxy"}
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2


def die_with_launcher(environ: Mapping[str, str]) -> int | None:
    """Ask the kernel to kill this rank when the process that launched it dies.

    Only where that process is torchrun's, or a program of MPI by its name: a shell that began this process in the
    background may end before it.

    Returns:
        The signal that was asked for before, 0 where none was, for `outlive_launcher`; None where nothing was changed.
    """
    parent = os.getppid()
    if sys.platform != "linux" or ("TORCHELASTIC_RUN_ID" not in environ and _program(parent) not in _PROGRAMS):
        return None
    before = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_PDEATHSIG, ctypes.byref(before))
    die_with(parent)
    return before.value


def outlive_launcher(before: int) -> None:
    """Undo `die_with_launcher`: what this process does after the run is no longer the run's."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, before)


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
