"""A link between two nodes: messages, beats, and how long nothing has come."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from paceline.nodes import node_link
from paceline.nodes.line_channel import LineChannel
from paceline.nodes.node_link import NodeLink
from tests.nodes.test_line_channel import as_tcp
from tests.waiting import wait_until


@contextmanager
def connection() -> Iterator[tuple[NodeLink, socket.socket]]:
    """A link, and the other end of its connection."""
    ours, theirs = socket.socketpair()
    link = NodeLink(LineChannel(as_tcp(ours)))
    try:
        with theirs:
            yield link, theirs
    finally:
        link.close()


def next_message(link: NodeLink) -> object:
    """The next message of a link, once there is one."""
    got: list[object] = []

    def look() -> bool:
        message = link.next_message()
        got.extend([] if message is None else [message])
        return bool(got)

    wait_until(look)
    return got[0]


def test_messages_arrive_in_their_order_and_beats_are_no_messages() -> None:
    with connection() as (link, theirs):
        theirs.sendall(b'{"do": "beat"}\n{"do": "a"}\n{"do": "beat"}\n{"do": "b"}\n')
        assert next_message(link) == {"do": "a"} and next_message(link) == {"do": "b"}
        assert link.next_message() is None


def test_a_beat_is_sent_now_and_then_and_one_that_comes_ends_the_silence() -> None:
    with connection() as (link, theirs):
        theirs.settimeout(10)
        assert theirs.recv(100).startswith(b'{"do": "beat"}\n')
        wait_until(lambda: link.silence_seconds > 0.3)
        theirs.sendall(b'{"do": "beat"}\n')
        wait_until(lambda: link.silence_seconds == 0.0)
        assert not link.loss


def test_a_long_pause_of_this_process_is_no_silence_of_the_other_node(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a SIGSTOP: the beats of the other node wait in the buffer, or are yet to come."""
    offset = 0.0

    class Clock:
        def monotonic(self) -> float:
            return time.monotonic() + offset

    monkeypatch.setattr(node_link, "time", Clock())
    with connection() as (link, _):
        wait_until(lambda: link.silence_seconds > 0.3)
        offset = 3600.0
        before = link.silence_seconds
        wait_until(lambda: link.silence_seconds > before + 0.5)
        assert link.silence_seconds < 10


def test_the_end_of_the_other_node_is_the_loss_of_the_link() -> None:
    with connection() as (link, theirs):
        theirs.shutdown(socket.SHUT_RDWR)
        wait_until(lambda: bool(link.loss))
        assert link.loss == "the connection was closed"
        link.send({"do": "anything"})  # is no error


def test_what_is_no_json_is_the_loss_of_the_link() -> None:
    with connection() as (link, theirs):
        theirs.sendall(b"GET / HTTP/1.1\n")
        wait_until(lambda: bool(link.loss))
        assert link.loss == "a line is no JSON"


def test_nobody_waits_for_a_network_that_takes_nothing() -> None:
    """As if the other end were cut off: its system takes no more bytes."""
    ours, theirs = socket.socketpair()
    link = NodeLink(LineChannel(as_tcp(ours)))

    def send_and_close() -> None:
        for _ in range(100):
            link.send({"text": "x" * 50_000})
        link.close()

    sender = threading.Thread(target=send_and_close, daemon=True)
    sender.start()
    sender.join(10)
    is_stuck = sender.is_alive()
    theirs.close()  # which ends a send that waits
    sender.join(10)
    link.close()
    assert not is_stuck
