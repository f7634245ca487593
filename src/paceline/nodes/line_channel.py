"""A connection between two nodes that carries JSON values, one in each line."""

import json
import socket
from typing import Any

_MAX_BYTES = 4 << 20


class ChannelClosed(ConnectionError):
    """The other end has closed the connection, or sends something else than lines of JSON."""


class LineChannel:
    """A channel over a connected socket. Nothing is pickled, and a line has at most 4 MiB."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""

    @property
    def own_address(self) -> str:
        """This end's IP address."""
        return str(self._connection.getsockname()[0])

    def send(self, value: Any) -> None:
        """Send a value.

        Raises:
            OSError: the connection is lost.
        """
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self, *, timeout_seconds: float) -> Any:
        """Return the next value.

        Raises:
            TimeoutError: the other end sent no whole line in time.
            ChannelClosed: the other end has closed the connection, or sent no JSON.
            OSError: the connection is lost.
        """
        self._connection.settimeout(timeout_seconds)
        while b"\n" not in self._received:
            data = self._connection.recv(1 << 16)
            if not data:
                raise ChannelClosed("the connection was closed")
            self._received += data
            if len(self._received) > _MAX_BYTES:
                raise ChannelClosed("a line is too long")
        line, _, self._received = self._received.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError:
            raise ChannelClosed("a line is no JSON") from None

    def ask(self, request: Any, *, timeout_seconds: float) -> Any:
        """Send a request, and return the answer. The errors are those of `send` and `receive`."""
        self.send(request)
        return self.receive(timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()
