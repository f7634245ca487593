"""Signals in a worker: ours, the job's own, and those of its forked children."""

import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest

from paceline.launch.agent.signals import IGNORED_WHEN_REPEATED, STOP_SIGNALS, StopFlag


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is not
    found = StopFlag()
    yield found
    found.remove()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_each_of_them_asks_once_and_is_as_before_afterwards(flag: StopFlag, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    flag.install(ends_process=False)
    assert not flag.is_requested
    os.kill(os.getpid(), number)
    assert flag.is_requested and flag.signal == number
    flag.remove()
    assert not flag.is_requested and signal.getsignal(number) is before


def test_what_the_job_installs_before_or_meanwhile_hears_it_too_and_stays(flag: StopFlag) -> None:
    heard: list[int] = []

    def early(number: int, _: FrameType | None) -> None:
        heard.append(number)

    def late(number: int, _: FrameType | None) -> None:
        heard.append(-number)
        raise SystemExit(3)

    signal.signal(signal.SIGTERM, early)
    flag.install(ends_process=False)
    signal.signal(signal.SIGUSR1, late)
    flag.reinstall()
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.is_requested and heard == [signal.SIGTERM]
    os.kill(os.getpid(), signal.SIGUSR1)  # what it raises would end the program before all is saved
    assert heard == [signal.SIGTERM, -signal.SIGUSR1]
    flag.remove()
    assert signal.getsignal(signal.SIGTERM) is early and signal.getsignal(signal.SIGUSR1) is late


@pytest.mark.parametrize("theirs", [signal.SIG_DFL, signal.SIG_IGN])
def test_a_library_that_puts_back_the_default_does_not_take_the_stop_away(flag: StopFlag, theirs: Any) -> None:
    flag.install(ends_process=False)
    signal.signal(signal.SIGTERM, theirs)
    flag.reinstall()
    os.kill(os.getpid(), signal.SIGTERM)
    assert flag.is_requested


def test_a_second_one_does_what_it_did_before_in_a_process_that_is_the_user_s(flag: StopFlag) -> None:
    flag.install(ends_process=False)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("number", IGNORED_WHEN_REPEATED)
def test_what_comes_twice_by_itself_is_one_wish(flag: StopFlag, number: signal.Signals) -> None:
    flag.install()
    for _ in range(3):
        os.kill(os.getpid(), number)
    assert flag.signal == number


def status_of_child(body: Any) -> int:
    """How a child ends that gets SIGTERM."""
    pid = os.fork()
    if pid == 0:
        body()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_fork_of_the_job_s_ends_by_a_signal_as_any_process(flag: StopFlag) -> None:
    """As `Pool.terminate` needs it, which waits for its processes."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    flag.install(listens_in_forks=True)
    assert status_of_child(lambda: None) == 0  # a rank that is born: a stop that comes now is not lost
    flag.install()
    assert status_of_child(lambda: None) == -signal.SIGTERM
    assert status_of_child(flag.reinstall) == -signal.SIGTERM


def test_the_starter_s_word_needs_no_handler(flag: StopFlag) -> None:
    asked: list[int] = []
    flag.install(poll_stop_request=lambda: bool(asked))
    assert not flag.is_requested
    asked.append(1)
    assert flag.is_requested and flag.signal is None
