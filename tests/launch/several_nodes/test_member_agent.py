"""The agent of a member between two attempts: how it ends, and what the head hears of it."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.config.settings import Nodes
from paceline.launch.agent.signals import STOP_SIGNALS
from paceline.launch.several_nodes import member_agent
from paceline.launch.several_nodes.member_agent import MemberAgent
from paceline.nodes.line_channel import LineChannel
from paceline.nodes.node_link import NodeLink
from tests.nodes.test_line_channel import as_tcp


class Head:
    """The head, which this test plays, and the agent of node 1."""

    def __init__(self, *, patience: float = 30.0) -> None:
        ours, theirs = socket.socketpair()
        self.channel = LineChannel(as_tcp(theirs))
        link = NodeLink(LineChannel(as_tcp(ours)))
        self.agent = MemberAgent(link, node=1, head="host0", ranks_per_node=1, settings=Nodes(patience=patience))

    def heard(self) -> list[Any]:
        messages: list[Any] = []
        try:
            while True:
                messages += self.channel.receive_available(seconds=0.2)
        except OSError:
            return [message for message in messages if message != {"do": "beat"}]


@pytest.fixture
def head() -> Iterator[Head]:
    made = Head()
    yield made
    made.channel.close()


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_stop_signal_ends_it_and_the_head_hears_why(head: Head, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an attempt, no rank would stop because of the signal."""
    monkeypatch.setattr(member_agent, "_STOP_SECONDS", 0.1)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    end = head.agent.run()
    assert (end.exit_code, end.is_head_lost) == (75, False)
    assert head.heard() == [{"do": "left", "reason": "it was asked to stop"}]


def test_the_end_of_the_head_is_a_reason_to_come_again(head: Head) -> None:
    head.channel.close()
    end = head.agent.run()
    assert (end.exit_code, end.is_head_lost) == (75, True) and "node 0 (host0) is gone: its agent has ended" in end.text


def test_the_word_of_the_head_before_its_end_counts(head: Head) -> None:
    head.channel.send({"do": "end", "node": 1, "exit_code": 4, "text": "a difference"})
    head.channel.close()
    end = head.agent.run()
    assert (end.exit_code, end.text, end.is_head_lost) == (4, "a difference", False)


def test_a_silent_head_is_given_up_and_would_hear_it() -> None:
    head = Head(patience=1.0)
    end = head.agent.run()
    assert (end.exit_code, end.is_head_lost) == (75, True) and "nothing for 1 s" in end.text
    assert head.heard() == [{"do": "left", "reason": "it has given up node 0, from which nothing came for 1 s"}]
    head.channel.close()


def test_whoever_was_given_up_by_the_head_may_come_again(head: Head) -> None:
    head.channel.send({"do": "end", "node": 1, "exit_code": 75, "text": "given up", "may_return": True})
    end = head.agent.run()
    assert (end.exit_code, end.is_head_lost) == (75, True)


def test_a_head_that_was_silent_and_is_there_again_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    head = Head(patience=6.0)

    def come_back() -> None:
        time.sleep(4.0)
        for _ in range(10):
            head.channel.send({"do": "beat"})
            time.sleep(0.05)
        head.channel.send({"do": "end", "node": 1, "exit_code": 0, "text": "done"})

    threading.Thread(target=come_back, daemon=True).start()
    assert head.agent.run().text == "done"
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "node 0 (host0): nothing for 3 s; it counts as gone after 6 s (nodes.patience)",
        "node 0 (host0) is there again",
    ]
    head.channel.close()
