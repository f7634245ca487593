"""The connection between a worker and a server. It has its own process group, so a failure breaks nothing else."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, TCPStore  # type: ignore[attr-defined]

from paceline.comm.process_group import LaunchInfo, WorkerEndpoint
from paceline.errors import MachineError

_SERVER, _WORKER = 0, 1
_POLL_SECONDS = 0.02
CONNECT_SECONDS = 60.0  # a process starts slowly on a busy machine
_TICKET_KEY = "paceline-server/{}/tickets/{}"


class MessageKind(IntEnum):
    """The kind of a message.

    Workers send HELLO, PULL (request weights) and PUSH (gradients). Servers send FIXED (tensors that no update
    changes), LEASE (weights, and from the first server a share), WAIT (no share yet, or a push was received) and OVER
    (end of run).
    """

    HELLO = 1
    FIXED = 2
    LEASE = 3
    WAIT = 4
    PUSH = 5
    OVER = 6
    PULL = 7


class ConnectionLost(Exception):
    """The other end has exited, or did not answer in time."""


@dataclass(frozen=True, kw_only=True)
class ServerMessage:
    """A message between a worker and a server: its kind, its JSON fields, and optionally a buffer of bytes."""

    kind: MessageKind
    fields: Mapping[str, Any] = field(default_factory=dict)
    buffer: Tensor | None = None


class Connection:
    """One end of a connection. A broken connection is never reused.

    Each wait for a part of a message fails after `timeout_seconds`. The wait for the connection itself fails after
    `timeout_seconds` or `CONNECT_SECONDS`, whichever is longer.
    """

    def __init__(self, store: Store, *, name: str, is_server: bool, timeout_seconds: float) -> None:
        local_rank, self._peer = (_SERVER, _WORKER) if is_server else (_WORKER, _SERVER)
        prefix_store = PrefixStore(f"paceline-server/line/{name}/", store)
        self._timeout = timedelta(seconds=timeout_seconds)
        connect_timeout = timedelta(seconds=max(timeout_seconds, CONNECT_SECONDS))
        try:
            self._group: Any = ProcessGroupGloo(prefix_store, local_rank, 2, connect_timeout)
        except (RuntimeError, dist.DistError) as error:
            raise ConnectionLost(str(error)) from error

    def send(self, message: ServerMessage) -> None:
        """Send a message to the other end.

        Raises:
            ConnectionLost
        """
        fields = torch.frombuffer(bytearray(json.dumps(dict(message.fields)).encode()), dtype=torch.uint8)
        num_bytes = 0 if message.buffer is None else message.buffer.numel()
        parts = [torch.tensor([int(message.kind), fields.numel(), num_bytes]), fields]
        for part in [*parts, *([] if message.buffer is None or not num_bytes else [message.buffer])]:
            self._complete(self._group.send, part)

    def receive(self, *, buffer: Tensor | None = None) -> ServerMessage:
        """Receive the next message. If `buffer` has the right size, the bytes of the message are read into it.

        Raises:
            ConnectionLost
        """
        header = torch.zeros(3, dtype=torch.int64)
        self._complete(self._group.recv, header)
        kind, length, num_bytes = header.tolist()
        fields = torch.empty(length, dtype=torch.uint8)
        self._complete(self._group.recv, fields)
        if buffer is None or buffer.numel() != num_bytes:
            buffer = torch.empty(num_bytes, dtype=torch.uint8)
        if num_bytes:
            self._complete(self._group.recv, buffer)
        return ServerMessage(
            kind=MessageKind(kind), fields=json.loads(bytes(fields.numpy())), buffer=buffer if num_bytes else None
        )

    def _complete(self, transfer: Any, tensor: Tensor) -> None:
        try:
            transfer([tensor], self._peer, 0).wait(self._timeout)
        except (RuntimeError, dist.DistError) as error:
            raise ConnectionLost(str(error)) from error


def open_store(launch_info: LaunchInfo, *, timeout_seconds: float) -> TCPStore:
    """Open the rendezvous store at which workers and servers connect.

    If there is only one server, it calls this and keeps the store. Several servers open the store in `World.join`.

    Raises:
        MachineError: the store cannot be opened.
    """
    try:
        return TCPStore(
            launch_info.address,
            launch_info.port or 0,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            master_listen_fd=launch_info.listen_fd,
        )
    except (RuntimeError, dist.DistError) as error:
        raise MachineError(f"the workers' rendezvous store can't be opened: {error}") from error


def connect_store(launch_info: LaunchInfo, *, timeout_seconds: float) -> TCPStore:
    """Open a new connection to the rendezvous store, so that a blocking wait delays no other caller.

    Raises:
        ConnectionLost: the store can't be reached.
    """
    try:
        return TCPStore(
            launch_info.address,
            launch_info.port or 0,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
        )
    except (RuntimeError, dist.DistError) as error:
        raise ConnectionLost(str(error)) from error


def connect_to_server(endpoint: WorkerEndpoint, *, server: int, timeout_seconds: float) -> Connection:
    """Open a worker's end of a new connection. The worker draws a number from the store, and the server uses it too.

    Raises:
        ConnectionLost
    """
    store = connect_store(endpoint.launch_info, timeout_seconds=timeout_seconds)
    try:
        number = int(store.add(_TICKET_KEY.format(endpoint.session, server), 1))
    except (RuntimeError, dist.DistError) as error:
        raise ConnectionLost(str(error)) from error
    name = f"{endpoint.session}/{server}/{number}"
    return Connection(store, name=name, is_server=False, timeout_seconds=timeout_seconds)


class ConnectionAcceptor:
    """A server's object that accepts the connections of new and restarted workers, at any time."""

    def __init__(self, endpoint: WorkerEndpoint, *, server: int, timeout_seconds: float) -> None:
        self._launch_info = endpoint.launch_info
        self._ticket_key = _TICKET_KEY.format(endpoint.session, server)
        self._name = f"{endpoint.session}/{server}"
        self._timeout = timeout_seconds
        self._store = connect_store(endpoint.launch_info, timeout_seconds=timeout_seconds)
        self._num_accepted = 0
        self.is_closed = False

    def wait_for_worker(self) -> int | None:
        """Return the number of the next worker to arrive, or None once the acceptor is closed."""
        while not self.is_closed:
            if self._num_accepted < int(self._store.add(self._ticket_key, 0)):
                self._num_accepted += 1
                return self._num_accepted
            time.sleep(_POLL_SECONDS)
        return None

    def connect(self, number: int) -> Connection:
        """Open the server's end of the connection to the worker with this number.

        Raises:
            ConnectionLost
        """
        store = connect_store(self._launch_info, timeout_seconds=self._timeout)
        name = f"{self._name}/{number}"
        return Connection(store, name=name, is_server=True, timeout_seconds=self._timeout)
