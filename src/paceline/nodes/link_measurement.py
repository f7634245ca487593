"""The measurement of a link between two nodes: a connection to a port that the kernel chose, pings, and a stream.

gloo and NCCL connect in the same way, so a firewall that would stop them stops the test too.
"""

import math
import socket
import threading
import time
from contextlib import suppress

import msgspec

from paceline.nodes.line_channel import accept_connection, close_listener

_PING, _STREAM, _DONE = b"p", b"s", b"d"
_LENGTH_BYTES = 8
_NUM_PINGS = 10
_FIRST_BYTES, _MAX_BYTES, _CHUNK_BYTES = 16 << 10, 256 << 20, 1 << 20  # the first has many packets
_TIMEOUT_SECONDS = 3.0
_SLOW_BYTES_PER_SECOND, _SLOW_PING_SECONDS = 20 << 20, 0.02


class LinkResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a test. If `problem` is not empty, the link does not work, and the numbers are 0."""

    ping_seconds: float = 0.0
    bytes_per_second: float = 0.0
    problem: str = ""

    @property
    def is_slow(self) -> bool:
        """Return whether the link works, but not well enough for gradients."""
        is_slow = self.bytes_per_second < _SLOW_BYTES_PER_SECOND or self.ping_seconds > _SLOW_PING_SECONDS
        return not self.problem and is_slow


class LinkServer:
    """A server that answers the link tests of other nodes, in threads, at one address of this machine."""

    def __init__(self, address: str) -> None:
        self._listener = socket.create_server((address, 0), backlog=64)
        self.address: tuple[str, int] = self._listener.getsockname()[:2]
        """The IP address and the port, which the kernel chose."""
        threading.Thread(target=self._accept, name="paceline-links", daemon=True).start()

    def close(self) -> None:
        """End the server."""
        close_listener(self._listener)

    def _accept(self) -> None:
        while (connection := accept_connection(self._listener)) is not None:
            threading.Thread(target=_answer, args=(connection,), name="paceline-link", daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection, suppress(OSError):
        connection.settimeout(10 * _TIMEOUT_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while kind := connection.recv(1):
            if kind == _PING:
                connection.sendall(_PING)
            elif kind == _STREAM:
                length = int.from_bytes(_receive_exactly(connection, _LENGTH_BYTES), "big")
                _skip(connection, min(length, _MAX_BYTES))
                connection.sendall(_DONE)


def try_link(address: tuple[str, int], *, stream_seconds: float) -> LinkResult:
    """Test the link to another node's `LinkServer`.

    The stream is repeated with twice the bytes until it takes `stream_seconds`. A slow link is tested once more,
    because a busy processor can make a fast one look slow. With `stream_seconds=0`, only a short stream tells whether
    the link works, and no link is slow.
    """
    result = _try_once(address, stream_seconds=stream_seconds)
    if not result.is_slow:
        return result
    again = _try_once(address, stream_seconds=stream_seconds)
    is_better = not again.is_slow or again.bytes_per_second > result.bytes_per_second  # a broken link is not slow
    return again if is_better else result


def _try_once(address: tuple[str, int], *, stream_seconds: float) -> LinkResult:
    result = LinkResult(problem="no answer to a connection")
    try:
        with socket.create_connection(address, timeout=_TIMEOUT_SECONDS) as connection:
            result = LinkResult(problem=f"connected, then nothing for {_TIMEOUT_SECONDS:.0f} s")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            ping_seconds = min(_ping(connection) for _ in range(_NUM_PINGS))
            num_bytes = _FIRST_BYTES
            while True:
                seconds = _send_stream(connection, num_bytes)
                if not stream_seconds:
                    return LinkResult(bytes_per_second=math.inf)
                result = LinkResult(ping_seconds=ping_seconds, bytes_per_second=num_bytes / seconds)
                if seconds > stream_seconds or num_bytes >= _MAX_BYTES:
                    return result
                num_bytes *= 2
    except TimeoutError:
        return result  # after a stream that has come through, the link is only slow
    except OSError as error:
        return LinkResult(problem=(error.strerror or str(error)).lower())


def _ping(connection: socket.socket) -> float:
    start_time = time.perf_counter()
    connection.sendall(_PING)
    _receive_exactly(connection, 1)
    return time.perf_counter() - start_time


def _send_stream(connection: socket.socket, num_bytes: int) -> float:
    """Send a stream, and return the seconds until the other end has all of it."""
    chunk = memoryview(bytes(min(num_bytes, _CHUNK_BYTES)))
    start_time = time.perf_counter()
    connection.sendall(_STREAM + num_bytes.to_bytes(_LENGTH_BYTES, "big"))
    for _ in range(num_bytes // len(chunk)):
        connection.sendall(chunk)
    _receive_exactly(connection, 1)
    return time.perf_counter() - start_time


def _receive_exactly(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = connection.recv(length - len(data))
        if not part:
            raise ConnectionError("closed by the other end")
        data += part
    return data


def _skip(connection: socket.socket, length: int) -> None:
    """Receive `length` bytes and drop them."""
    buffer = bytearray(_CHUNK_BYTES)
    while length:
        received = connection.recv_into(buffer, min(length, _CHUNK_BYTES))
        if not received:
            raise ConnectionError("closed by the other end")
        length -= received
