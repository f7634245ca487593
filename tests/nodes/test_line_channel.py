"""A channel of lines: one deadline for a whole line, and a listener that outlives a failed accept."""

import errno
import socket
import threading
import time
from typing import Any

import pytest

from paceline.nodes.line_channel import ChannelError, LineChannel, accept_connection, close_listener


def test_values_arrive_in_their_order_also_if_they_arrive_together() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        channel = LineChannel(as_tcp(ours))
        theirs.sendall(b'{"a": 1}\n[2]\n"half')
        assert channel.receive(timeout_seconds=1) == {"a": 1} and channel.receive(timeout_seconds=1) == [2]
        theirs.sendall(b'"\n')
        assert channel.receive(timeout_seconds=1) == "half"
        channel.close()


def test_whoever_sends_byte_by_byte_does_not_extend_the_time() -> None:
    ours, theirs = socket.socketpair()

    def drip() -> None:
        for _ in range(20):
            try:
                theirs.sendall(b"1")
            except OSError:
                return
            time.sleep(0.1)

    thread = threading.Thread(target=drip)
    thread.start()
    channel, start_time = LineChannel(as_tcp(ours)), time.monotonic()
    with pytest.raises(TimeoutError):
        channel.receive(timeout_seconds=0.4)
    assert time.monotonic() - start_time < 1.5, "the bytes come for two seconds"
    channel.close()
    thread.join()
    theirs.close()


@pytest.mark.parametrize("line", [b"no json\n", b"[" * 100_000 + b"\n", b"1" * (5 << 20), b""])
def test_what_is_no_line_of_json_is_an_error(line: bytes) -> None:
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=lambda: (send(theirs, line), theirs.close()))
    thread.start()
    channel = LineChannel(as_tcp(ours))
    with pytest.raises(ChannelError):
        channel.receive(timeout_seconds=10)
    channel.close()
    thread.join()


def test_a_channel_knows_that_the_other_end_has_gone() -> None:
    ours, theirs = socket.socketpair()
    channel = LineChannel(as_tcp(ours))
    assert not channel.is_closed
    theirs.close()
    assert channel.is_closed
    channel.close()


def test_too_many_open_files_do_not_end_a_listener() -> None:
    class Listener:
        def __init__(self) -> None:
            self.errors = [OSError(errno.EMFILE, "Too many open files")]

        def fileno(self) -> int:
            return 5

        def accept(self) -> Any:
            if self.errors:
                raise self.errors.pop()
            return "connection", None

    assert accept_connection(Listener()) == "connection"  # type: ignore[arg-type, comparison-overlap]


def test_a_closed_listener_ends_the_wait() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    found: list[Any] = ["waits"]
    thread = threading.Thread(target=lambda: found.append(accept_connection(listener)))
    thread.start()
    time.sleep(0.1)
    close_listener(listener)
    thread.join(timeout=5)
    assert found == ["waits", None]


def as_tcp(connection: socket.socket) -> Any:
    """A socket that takes the options of TCP, which a pair of sockets has not."""

    class Tcp:
        def setsockopt(self, *_: Any) -> None:
            return

        def __getattr__(self, name: str) -> Any:
            return getattr(connection, name)

        def fileno(self) -> int:
            return connection.fileno()

    return Tcp()


def send(connection: socket.socket, data: bytes) -> None:
    try:
        connection.sendall(data)
    except OSError:
        return
