"""A connection between two nodes that carries JSON values, one in each line."""

import errno
import json
import select
import socket
import sys
import time
from contextlib import suppress
from typing import Any

SIGN = "sign"
"""The message that a node is alive, on a connection of its own, and the answer to it."""
_MAX_BYTES = 4 << 20
_PAUSE_SECONDS = 0.1
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}  # a machine that vanishes is noticed after 30 s


class ChannelError(ConnectionError):
    """The other end has closed the connection, or sends something else than lines of JSON."""


class LineChannel:
    """A channel over a connected socket. Nothing is pickled, and a line has at most 4 MiB.

    `key` is the name under which the other end knows this one, if that end accepts further connections.
    """

    def __init__(self, connection: socket.socket, *, key: str = "") -> None:
        self._connection = connection
        self.key = key
        self._has_sign = False
        self._received = b""
        address = connection.getsockname()
        self.own_address = str(address[0]) if address else ""
        """This end's IP address; empty if the connection has none."""
        self.peer_address = _peer_address(connection)
        """The other end's IP address; empty if the connection has none, or is closed."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            for name, value in _KEEPALIVE.items():
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    @property
    def is_closed(self) -> bool:
        """Return whether the other end has closed the connection while nothing was expected from it."""
        try:
            is_readable = bool(select.select([self._connection], [], [], 0)[0])
            return is_readable and not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:  # another thread has received the bytes
            return False
        except (OSError, ValueError):
            return True

    def send(self, value: Any) -> None:
        """Send a value.

        Raises:
            OSError: the connection is lost.
        """
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, *, timeout_seconds: float | None) -> Any:
        """Return the next value; None waits without a limit.

        Raises:
            TimeoutError: the other end sent no whole line in time.
            ChannelError: the other end has closed the connection, or sent no JSON.
            OSError: the connection is lost.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while b"\n" not in self._received:
            remaining = None if deadline is None else deadline - time.monotonic()
            if remaining is not None and remaining <= 0:
                raise TimeoutError("timed out")
            self._connection.settimeout(remaining)
            data = self._connection.recv(1 << 16)
            if not data:
                raise ChannelError("the connection was closed")
            self._add(data)
        return self._take_line()

    def receive_available(self, *, seconds: float) -> list[Any]:
        """Return the values that have arrived whole, after a wait of up to `seconds` for the first bytes.

        The socket stays without a timeout, so that another thread can send meanwhile.

        Raises:
            ChannelError: the other end has closed the connection, or sent no JSON.
            OSError: the connection is lost.
        """
        self._connection.settimeout(None)
        if b"\n" not in self._received and select.select([self._connection], [], [], seconds)[0]:
            data = self._connection.recv(1 << 16)
            if not data:
                raise ChannelError("the connection was closed")
            self._add(data)
        values = []
        while b"\n" in self._received:
            values.append(self._take_line())
        return values

    def _add(self, data: bytes) -> None:
        self._received += data
        if len(self._received) > _MAX_BYTES:
            raise ChannelError("a line is too long")

    def _take_line(self) -> Any:
        line, _, self._received = self._received.partition(b"\n")
        try:
            return json.loads(line)
        except (ValueError, RecursionError):
            raise ChannelError("a line is no JSON") from None

    def ask(self, request: Any, *, timeout_seconds: float) -> Any:
        """Send a request, and return the answer. The errors are those of `send` and `receive`."""
        self._connection.settimeout(timeout_seconds)
        self.send(request)
        return self.receive(timeout_seconds=timeout_seconds)

    def send_sign(self, *, timeout_seconds: float) -> bool:
        """Tell the other end, over a new connection, that this one is alive. Return whether it answers.

        After a cut of the network, a new connection works at once, while TCP repeats what it lost on the old one only
        after a pause as long as the cut.
        """
        try:
            address = self._connection.getpeername()
            with socket.create_connection(address, timeout=timeout_seconds) as connection:
                channel = LineChannel(connection)
                sign = {"do": SIGN, "key": self.key}
                return bool(channel.ask(sign, timeout_seconds=timeout_seconds) == {"do": SIGN})
        except (OSError, ValueError):
            return False

    def note_sign(self) -> None:
        """Note that the other end is alive, although this connection does not show it."""
        self._has_sign = True

    def take_sign(self) -> bool:
        """Return whether a sign was noted since the last call."""
        has_sign, self._has_sign = self._has_sign, False
        return has_sign

    def close(self) -> None:
        """Close the connection. Another thread that waits for a message then gets an error."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def accept_connection(listener: socket.socket) -> socket.socket | None:
    """Return the next connection; None if the listener was closed. Other errors, such as too many open files, pass."""
    while listener.fileno() >= 0:
        try:
            return listener.accept()[0]
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):  # after `shutdown`
                break
            time.sleep(_PAUSE_SECONDS)
    return None


def close_listener(listener: socket.socket) -> None:
    """Close a listening socket, and end an `accept_connection` that waits in another thread."""
    with suppress(OSError):
        listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _peer_address(connection: socket.socket) -> str:
    try:
        address = connection.getpeername()
    except OSError:
        return ""
    return str(address[0]) if address else ""
