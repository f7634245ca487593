"""Rendezvous on one machine for launchers that offer none: rank 0 listens, and writes its port to a file."""

import errno
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import MutableMapping
from contextlib import ExitStack, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from paceline.errors import MachineError, UsageError
from paceline.filesystem.atomic_files import read_json, write_json
from paceline.filesystem.run_lock import is_holder_alive, this_process
from paceline.launch.failures.oom_detection import explain_open_files
from paceline.launch.inherited_environment import drop_inherited, mark_rank_variables_as_own
from paceline.launch.launcher_variables import JoinedWorld, is_loopback
from paceline.nodes.network_interfaces import interface_towards, is_own_address, resolve_host

_WAIT_SECONDS = 60.0
_CONNECT_SECONDS = 5.0
_POLL_SECONDS = 0.02
_LOOPBACK = "127.0.0.1"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
_INVITATION_FILE = "invitation.json"


def adopt_launcher_variables(joined: JoinedWorld, environ: MutableMapping[str, str]) -> None:
    """Set the variables that torch reads, such as RANK, from the variables of the launcher.

    Raises:
        UsageError: ranks run on several machines, and MASTER_ADDR or MASTER_PORT is not set.
        MachineError: rank 0 did not publish its port.
    """
    drop_inherited(environ)
    _set_variables(joined, environ)
    mark_rank_variables_as_own(environ)


def _set_variables(joined: JoinedWorld, environ: MutableMapping[str, str]) -> None:
    environ["RANK"] = str(joined.rank)
    environ["WORLD_SIZE"] = str(joined.world_size)
    environ["LOCAL_RANK"] = str(joined.local_rank)
    environ["LOCAL_WORLD_SIZE"] = str(joined.local_world_size)
    if joined.is_one_node and (joined.has_local_ranks or is_loopback(joined.address or "127.0.0.1")):
        _use_loopback(environ)
    elif joined.address and not joined.is_one_node:
        _use_reachable_interface(environ, head=joined.address)
    if joined.world_size == 1 or (joined.address and joined.port):
        environ.update({name: str(value) for name, value in _address_variables(joined) if value})
        return
    if not joined.is_one_node:
        raise UsageError(
            f"{joined.kind} started ranks on several machines, but MASTER_ADDR or MASTER_PORT is not set.",
            hint="export MASTER_ADDR=<host of rank 0> MASTER_PORT=<free port>",
        )
    environ["MASTER_ADDR"] = "127.0.0.1"
    folder = _rendezvous_folder(joined)
    if joined.rank == 0:
        listener = listen_on_free_port()
        environ["MASTER_PORT"] = str(listener.getsockname()[1])
        environ["PACELINE_LISTEN_FD"] = str(listener.detach())
        _publish_port(folder, port=int(environ["MASTER_PORT"]))
    else:
        environ["PACELINE_LISTEN_FD"] = ""
        environ["MASTER_PORT"] = str(_wait_for_port(folder, joined))


def _address_variables(joined: JoinedWorld) -> tuple[tuple[str, object], ...]:
    return ("MASTER_ADDR", joined.address), ("MASTER_PORT", joined.port)


def _use_loopback(environ: MutableMapping[str, str]) -> None:
    """Make gloo use the loopback interface: all ranks are on this machine, and no other host needs to reach them."""
    if Path("/sys/class/net/lo").exists():
        environ.setdefault(_GLOO_INTERFACE, "lo")


def _use_reachable_interface(environ: MutableMapping[str, str], *, head: str) -> None:
    """Make gloo use the interface that leads to rank 0, if others don't reach the address of the own host name.

    Debian and Ubuntu resolve it to 127.0.1.1, where gloo would listen. If it is no address of this machine, gloo would
    listen at 127.0.0.1.
    """
    own_address = resolve_host(socket.gethostname())
    is_reachable = bool(own_address) and not own_address.startswith("127.") and is_own_address(own_address)
    if environ.get(_GLOO_INTERFACE) or is_reachable:
        return
    interface = interface_towards(head)
    if interface:
        environ[_GLOO_INTERFACE] = interface


def reserve_port(address: str) -> socket.socket:
    """Return a socket that keeps a free port of an address of this machine, for `listen_on_port` to listen on.

    Raises:
        MachineError: this machine has no such address any more.
    """
    reservation = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reservation.bind((address, 0))
    except OSError as error:
        reservation.close()
        raise MachineError(f"{address} is no address of this machine: {error.strerror or error}.") from None
    return reservation


def listen_on_free_port() -> socket.socket:
    """Return a socket that listens on a free port of the loopback address (`listen_on_port`)."""
    return listen_on_port(_LOOPBACK, 0)


def listen_on_port(address: str, port: int) -> socket.socket:
    """Return a socket that listens on a port that `reserve_port` keeps, or on any (0), after a test connection to it.

    Raises:
        MachineError: the loopback interface is down or has no IPv4 address, or too many files are open.
    """
    try:
        with ExitStack() as opened:
            listener = opened.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            if port:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind((address, port))
            listener.listen(1024)
            with socket.create_connection(listener.getsockname(), timeout=_CONNECT_SECONDS):
                listener.accept()[0].close()
            listener.set_inheritable(True)
            opened.pop_all()
            return listener
    except OSError as error:
        if address == _LOOPBACK:
            raise _loopback_error(error) from None
        raise MachineError(f"rank 0 can't listen at {address}, port {port}: {error.strerror or error}.") from None


def _loopback_error(error: OSError) -> MachineError:
    message = f"127.0.0.1 can't be reached: {error.strerror or error}."
    cause, hint = "is the loopback interface up?", "ip link set lo up; or --ranks 1, which needs no network"
    if error.errno == errno.EADDRNOTAVAIL:
        cause = "the loopback interface has no IPv4 address"
        hint = "ip link set lo up; ip addr add 127.0.0.1/8 dev lo; or --ranks 1, which needs no network"
    cause, hint = explain_open_files(str(error)) or (cause, hint)
    return MachineError(message, cause=cause, hint=hint)


def _rendezvous_folder(joined: JoinedWorld) -> Path:
    """Return the folder that only the ranks of this world use.

    Its name is a hash that includes the launcher's job id. If that id is not unique, the hash includes the session
    instead. The parent process does not identify the world if each rank has a wrapper process. Therefore it is used
    only if this process leads a session of its own.
    """
    session = os.getsid(0)
    identity = [joined.job_id] if joined.has_unique_job_id else [session if session != os.getpid() else os.getppid()]
    parts = [joined.kind, *identity, socket.gethostname(), joined.world_size, str(Path.cwd()), *sys.argv]
    return user_folder() / f"meet-{sha256(json.dumps(parts).encode()).hexdigest()[:24]}"


def user_folder() -> Path:
    """Return this user's folder on this machine for files by which ranks find each other.

    Raises:
        MachineError: the folder belongs to another user.
    """
    folder = Path(tempfile.gettempdir()) / f"paceline-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.lstat().st_uid != os.getuid() or folder.is_symlink():
        raise MachineError(f"{folder} belongs to another user.", hint="export MASTER_ADDR and MASTER_PORT")
    return folder


def _publish_port(folder: Path, *, port: int) -> None:
    """Write the port of rank 0, and remove files of an earlier world.

    Raises:
        UsageError: rank 0 of the earlier world is still alive.
    """
    invitation = _read_invitation(folder)
    if invitation is not None and invitation["holder"]["pid"] != os.getpid():
        raise UsageError(
            f"process {invitation['holder']['pid']} is waiting for the other ranks of the same command.",
            where=str(folder),
            cause="the same command was started twice at the same time, or ranks of an earlier start are missing",
            hint=f"export MASTER_ADDR=127.0.0.1 MASTER_PORT=<free port>, or kill {invitation['holder']['pid']}",
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    write_json(folder / _INVITATION_FILE, {"port": port, "holder": this_process()})


def _read_invitation(folder: Path) -> dict[str, Any] | None:
    """Return the port and process that rank 0 wrote to a file; None if there is no file, or the process has ended."""
    try:
        invitation = read_json(folder / _INVITATION_FILE)
        return invitation if is_holder_alive(invitation["holder"]) and isinstance(invitation["port"], int) else None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _wait_for_port(folder: Path, joined: JoinedWorld) -> int:
    """Return the port of rank 0. The last rank to read it removes the folder, so the next world finds no old port."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        invitation = _read_invitation(folder)
        if invitation is not None:
            with suppress(OSError):
                (folder / f"heard-{joined.rank}").touch()
                if len(list(folder.glob("heard-*"))) == joined.world_size - 1:
                    shutil.rmtree(folder, ignore_errors=True)
            return int(invitation["port"])
        time.sleep(_POLL_SECONDS)
    raise MachineError(
        f"rank 0 did not publish its address within {_WAIT_SECONDS:.0f} s.",
        where=str(folder),
        cause="rank 0 did not start, or it started in a different folder or with different arguments",
        hint="export MASTER_ADDR=127.0.0.1 MASTER_PORT=<free port>",
    )
