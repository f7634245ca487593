"""Ownership of the environment variables that describe a rank, such as RANK and WORLD_SIZE.

Every program that a rank starts inherits these variables, but is not that rank. So `PACELINE_RANK_OWNER` stores the id
of the process for which they were set, and their checksum. A process with another id ignores them. The exception: if
the checksum differs, another launcher has set the variables since, and they are valid.
"""

import os
import zlib
from collections.abc import Mapping, MutableMapping
from pathlib import Path

OWNER_VARIABLE = "PACELINE_RANK_OWNER"
ATTEMPT_FOLDER = "PACELINE_ATTEMPT_FOLDER"
LISTEN_FD = "PACELINE_LISTEN_FD"
NODES = "PACELINE_NODES"  # the value of `--nodes`, if Paceline has started the ranks of several nodes itself
AGENT_PID = "PACELINE_AGENT_PID"  # of the command that has started the ranks of this machine
START_NUMBER = "PACELINE_START_NUMBER"  # set in a restarted worker of parameter servers; 2 after its first restart
_PACELINE_VARIABLES = (OWNER_VARIABLE, ATTEMPT_FOLDER, LISTEN_FD, START_NUMBER, AGENT_PID, NODES)
_WORLD = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID",
          "SLURM_STEP_ID", "SLURM_LOCALID", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")  # fmt: skip
_WORLD_PREFIXES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "OMPI_COMM_WORLD_", "PMI_", "PMIX_")


def mark_rank_variables_as_own(environ: MutableMapping[str, str]) -> None:
    """Record that the rank variables in this environment were set for this process."""
    environ[OWNER_VARIABLE] = f"{os.getpid()}:{_checksum(environ)}"


def own_environ(environ: Mapping[str, str]) -> Mapping[str, str]:
    """Return the environment without the rank variables that were set for another process."""
    pid, _, checksum = environ.get(OWNER_VARIABLE, "").partition(":")
    if not pid or pid == str(os.getpid()):
        return environ
    inherited = {*_PACELINE_VARIABLES, *(_world_variables(environ) if checksum == str(_checksum(environ)) else ())}
    return {name: value for name, value in environ.items() if name not in inherited}


def own_rank(environ: Mapping[str, str]) -> int:
    """Return the rank that the environment gives this process; 0 if it gives none, or one that is not a number."""
    rank = own_environ(environ).get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def drop_inherited(environ: MutableMapping[str, str]) -> None:
    """Remove from the environment the rank variables that were set for another process."""
    own_variables = own_environ(environ)
    for name in [name for name in environ if name not in own_variables]:
        del environ[name]


def leave_launcher(environ: MutableMapping[str, str]) -> None:
    """Remove the variables by which a launcher says that this process is a rank, because it starts ranks itself."""
    for name in [*_PACELINE_VARIABLES, *_world_variables(environ)]:
        environ.pop(name, None)


def attempt_folder(environ: Mapping[str, str]) -> Path | None:
    """Return the attempt folder if Paceline's launcher started this process as a rank, else None."""
    folder = own_environ(environ).get(ATTEMPT_FOLDER)
    return Path(folder) if folder else None


def _world_variables(environ: Mapping[str, str]) -> list[str]:
    return [name for name in environ if name in _WORLD or name.startswith(_WORLD_PREFIXES)]


def _checksum(environ: Mapping[str, str]) -> int:
    text = "\n".join(f"{name}={environ[name]}" for name in sorted(_world_variables(environ)))
    return zlib.crc32(text.encode(errors="surrogateescape"))
