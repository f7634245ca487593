"""What is asked of a forked helper: answered in another process, or left to who asked, and nothing is left behind."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

from paceline.measured_planning import helper_process as beside
from paceline.measured_planning.helper_process import Helper, NoAnswer, can_fork, start_helper


class Hands:
    def who(self) -> int:
        return os.getpid()

    def twice(self, value: int) -> int:
        return 2 * value

    def large(self) -> bytes:
        return b"x" * (3 << 20)

    def fail(self) -> None:
        raise ValueError("its own")

    def wait(self) -> None:
        time.sleep(600)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def helper(monkeypatch: pytest.MonkeyPatch) -> Iterator[Helper]:
    monkeypatch.setattr(beside, "can_fork", lambda: True)
    with start_helper(Hands) as found:
        assert found is not None
        yield found
    assert not any(child.pid == found._child for child in psutil.Process().children())


def test_it_answers_from_another_process(helper: Helper) -> None:
    pid = helper.begin("who")()
    assert pid == helper._child != os.getpid()
    assert helper.begin("twice", 21)() == 42
    assert len(helper.begin("large")()) == 3 << 20


def test_an_answer_that_nobody_waited_for_is_no_other_ones(helper: Helper) -> None:
    helper.begin("twice", 1)
    later = helper.begin("twice", 2)
    assert helper.begin("twice", 3)() == 6
    del later


@pytest.mark.parametrize("name", ["fail", "die", "nothing_like_it"])
def test_where_it_fails_there_is_no_answer(helper: Helper, name: str) -> None:
    answer = helper.begin(name)
    with pytest.raises(NoAnswer):
        answer()
    with pytest.raises(NoAnswer):
        helper.begin("who")


def test_what_stands_still_is_not_waited_for(helper: Helper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_LEAST_SECONDS", 0.3)
    monkeypatch.setattr(beside, "_PATIENCE", 0.0)
    answer, began = helper.begin("wait"), time.monotonic()
    with pytest.raises(NoAnswer):
        answer()
    assert time.monotonic() - began < 10
    assert not psutil.pid_exists(helper._child)


def test_what_can_not_be_sent_is_not_asked(helper: Helper) -> None:
    with pytest.raises(NoAnswer):
        helper.begin("twice", lambda: None)


def test_none_is_forked_beside_threads_or_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert can_fork()
    for where, name, value in (
        (threading, "active_count", 2),
        (torch.accelerator, "is_available", True),
        (torch.distributed, "is_initialized", True),
        (os, "sched_getaffinity", {0}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, _always(value))
            assert not can_fork()
            with start_helper(Hands) as found:
                assert found is None


def _always(value: Any) -> Any:
    return lambda *_: value
