"""A meeting point on one machine for launchers that name none: rank 0 listens, and says where in a file."""

import os
import socket
import tempfile
import time
from collections.abc import MutableMapping
from pathlib import Path

from paceline.errors import MachineError, UsageError
from paceline.launch.environments import Joined
from paceline.launch.owner import drop_inherited, mark_owner
from paceline.store.disk import write_text

_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.02


def adopt(joined: Joined, environ: MutableMapping[str, str]) -> None:
    """Write the launcher's numbers under the names that torch reads.

    Raises:
        UsageError: several machines and no MASTER_ADDR.
        MachineError: rank 0 did not say where it listens.
    """
    drop_inherited(environ)
    _put(joined, environ)
    mark_owner(environ)


def _put(joined: Joined, environ: MutableMapping[str, str]) -> None:
    environ["RANK"] = str(joined.rank)
    environ["WORLD_SIZE"] = str(joined.world_size)
    environ["LOCAL_RANK"] = str(joined.local_rank)
    environ["LOCAL_WORLD_SIZE"] = str(joined.local_world_size)
    if joined.world_size == 1 or (joined.address and joined.port):
        return
    if not joined.is_one_node:
        raise UsageError(
            f"{joined.kind} started ranks on several machines and MASTER_ADDR or MASTER_PORT is not set.",
            hint="export MASTER_ADDR=<host of rank 0> MASTER_PORT=<free port>",
        )
    environ["MASTER_ADDR"] = "127.0.0.1"
    environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    path = _meeting_file(joined.job_id)
    if joined.rank == 0:
        listener = listen()
        environ["MASTER_PORT"] = str(listener.getsockname()[1])
        environ["PACELINE_LISTEN_FD"] = str(listener.detach())
        write_text(path, environ["MASTER_PORT"])
    else:
        environ["PACELINE_LISTEN_FD"] = ""
        environ["MASTER_PORT"] = _wait_for(path)


def listen() -> socket.socket:
    """A socket that listens on a free port of this machine only."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    listener.set_inheritable(True)
    return listener


def _meeting_file(job_id: str) -> Path:
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise MachineError(f"{folder} belongs to somebody else.", hint="export MASTER_ADDR and MASTER_PORT")
    safe = "".join(c if c.isalnum() else "-" for c in job_id)
    return folder / f"meet-{safe}-{os.getppid()}"


def _wait_for(path: Path) -> str:
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        if path.exists():
            return path.read_text().strip()
        time.sleep(_POLL_SECONDS)
    raise MachineError(
        f"rank 0 did not say where it listens within {_WAIT_SECONDS:.0f} s.",
        where=str(path),
        hint="export MASTER_ADDR and MASTER_PORT",
    )
