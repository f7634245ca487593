"""The supervisor reads the messages of the fork server: which exits it believes, and which ranks it ends."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.launch.agent.forkserver_client import ForkserverClient
from paceline.launch.agent.shared_status import (
    make_status_buffer,
    read_end,
    read_failure_text,
    read_stop,
    write_end,
    write_failure_text,
    write_stop,
)
from paceline.launch.agent.signals import STOP_SIGNALS
from paceline.launch.agent.stop_requests import StopRequests
from paceline.launch.agent.supervisor import Supervisor
from paceline.launch.failures.failure_record import FORKSERVER_RANK, Failure
from paceline.launch.failures.stack_dumps import has_signal_handler

FORKSERVER = """
import os, sys, time
from paceline.launch.agent.shared_status import STATUS_FD, read_stop, write_end
status_fd = int(os.environ[STATUS_FD])
def say(line):
    os.write(1, (line + "\\n").encode())
def start(rank, body):
    pid = os.fork()
    if pid == 0:
        say(f"born {rank} {os.getpid()}")
        body()
        os._exit(0)
    return pid
def end(pid, rank):
    say(f"gone {rank} {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
"""


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """A request to stop leaves some signals ignored in this process, and what later tests start would ignore them."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def attempt(
    folder: Path, text: str, *, ranks: int = 2, saves: bool = True, sees_all_ranks: bool = True
) -> tuple[int, Failure | None]:
    """Run a starter of which `text` is the rest; nothing has torch."""
    forkserver = ForkserverClient(environ=os.environ, command=[sys.executable, "-c", FORKSERVER + text])
    stop_requests = StopRequests()
    agent = Supervisor(
        forkserver=forkserver,
        request=folder / "request.json",
        ranks=range(ranks),
        stop_requests=stop_requests,
        saves_checkpoints=saves,
        sees_all_ranks=sees_all_ranks,
    )
    try:
        with stop_requests.listening():
            return agent.run(lambda: None)
    finally:
        forkserver.close()


@pytest.mark.parametrize("status", [0, 75])
def test_an_exit_code_without_the_entry_s_own_word_is_no_end(tmp_path: Path, status: int) -> None:
    told = f"""
first = start(0, lambda: write_end(status_fd, rank=0, code={status}))
second = start(1, lambda: os._exit({status}))
end(first, 0)
end(second, 1)
"""
    code, failure = attempt(tmp_path, told)
    assert code == 1 and failure is not None and failure.rank == 1
    assert failure.message == f"the process exited with code {status} before the run was finished."
    assert "os._exit" in failure.screen and failure.said["error"] == "exit"


@pytest.mark.parametrize(("words", "ending", "code"), [
    ((0, 0), "os._exit(0)", 0),
    ((75, 75), "os._exit(0)", 75),
    ((0, 75), "os._exit(75)", 75),
    ((0, 0), "os.kill(os.getpid(), 11)", 0),
    ((0, 0), "os._exit(3)", 1),
])  # fmt: skip
def test_the_word_counts_and_how_the_process_went_down_after_it_only_where_the_job_says_so(
    tmp_path: Path, words: tuple[int, int], ending: str, code: int
) -> None:
    told = f"""
def body(rank, code):
    write_end(status_fd, rank=rank, code=code)
    {ending}
for rank, code in enumerate({words}):
    end(start(rank, lambda: body(rank, code)), rank)
"""
    found, failure = attempt(tmp_path, told)
    assert found == code and (failure is None) == (code != 1), failure


def test_who_waits_for_a_dead_rank_is_ended(tmp_path: Path) -> None:
    """It sleeps where no library notices that the other has gone."""
    told = f"""
def wait():
    time.sleep(60)
    open({str(tmp_path / "slept")!r}, "w").close()
other = start(1, wait)
end(start(0, lambda: os._exit(7)), 0)
end(other, 1)
"""
    code, failure = attempt(tmp_path, told)
    assert code == 1 and failure is not None and failure.rank == 0 and "exited with code 7" in failure.message
    assert not (tmp_path / "slept").exists()


@pytest.mark.parametrize(("status", "text"), [(-9, "was ended by SIGKILL"), (1, "exited with code 1")])
def test_the_failure_of_an_attempt_whose_starter_died_names_the_starter(tmp_path: Path, status: int, text: str) -> None:
    """The fork server itself still runs, and could start another attempt."""
    code, failure = attempt(tmp_path, f'say("starter 0 4711")\nsay("ended 0 {status}")\nsys.stdin.readline()')
    assert code == 1 and failure is not None and failure.rank == FORKSERVER_RANK
    assert f"the process that starts the ranks (PID 4711) {text}" in failure.message


def test_a_worker_that_is_over_or_lost_needs_no_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = """
end(start(0, lambda: write_end(status_fd, rank=0, code=0)), 0)
say("over 1 -9")
say("lost 2 -9")
"""
    assert attempt(tmp_path, told, ranks=3) == (0, None)
    assert "rank 2, a worker, was killed again" in capsys.readouterr().err


def test_a_stop_reaches_a_rank_whose_handlers_are_the_job_s(tmp_path: Path) -> None:
    """One ignores SIGTERM, one would be killed by it."""
    told = """
import signal
def body(rank, handler):
    signal.signal(signal.SIGTERM, handler)
    os.kill(agent, signal.SIGUSR2) if rank else None
    while not read_stop(status_fd, rank=rank):
        time.sleep(0.01)
    write_end(status_fd, rank=rank, code=75)
agent = os.getppid()
first = start(0, lambda: body(0, signal.SIG_IGN))
second = start(1, lambda: body(1, signal.SIG_DFL))
end(first, 0)
end(second, 1)
"""
    assert attempt(tmp_path, told) == (75, None)


def test_any_thread_may_run_one(tmp_path: Path) -> None:
    found: list[object] = []
    told = "end(start(0, lambda: write_end(status_fd, rank=0, code=0)), 0)"
    thread = threading.Thread(target=lambda: found.append(attempt(tmp_path, told, ranks=1)))
    thread.start()
    thread.join()
    assert found == [(0, None)]


def test_the_slate_keeps_texts_words_and_stops_apart() -> None:
    status_fd = make_status_buffer()
    for rank in (2, 0, 1):
        assert write_failure_text(status_fd, rank=rank, text=f"{rank}" * ((1 << 15) - 16))
        assert not write_failure_text(status_fd, rank=rank, text="x" * (1 << 15))
    assert [read_end(status_fd, rank=rank) for rank in range(4)] == [None] * 4
    write_end(status_fd, rank=1, code=75)
    write_stop(status_fd, rank=0)
    assert [read_end(status_fd, rank=rank) for rank in range(4)] == [None, 75, None, None]
    assert [read_stop(status_fd, rank=rank) for rank in range(4)] == [True, False, False, False]
    assert [set(read_failure_text(status_fd, rank=rank)) for rank in range(3)] == [{"0"}, {"1"}, {"2"}]
    os.close(status_fd)


def test_what_a_process_catches_is_the_kernel_s_word() -> None:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    assert has_signal_handler(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert not has_signal_handler(os.getpid(), signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, before)


@pytest.mark.parametrize("sees_all_ranks", [True, False])
def test_that_all_ranks_of_one_of_several_nodes_timed_out_does_not_say_that_all_ranks_did(
    tmp_path: Path, sees_all_ranks: bool
) -> None:
    """The rank for which they waited may be on another node."""
    told = """
import json
from pathlib import Path
def body(rank):
    record = {"rank": rank, "kind": "RuntimeError", "message": "gloo: Timed out waiting 1000ms for recv", "monotonic_ns": 1}
    (Path(sys.argv[1]).parent / f"failure-{rank}.json").write_text(json.dumps(record))
    os._exit(1)
pids = [start(rank, lambda rank=rank: body(rank)) for rank in range(2)]
for rank, pid in enumerate(pids):
    end(pid, rank)
"""
    code, failure = attempt(tmp_path, told, sees_all_ranks=sees_all_ranks)
    assert code == 1 and failure is not None
    assert (failure.kind in ("connection", "apart")) is sees_all_ranks, failure
