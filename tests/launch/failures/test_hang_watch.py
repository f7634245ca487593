"""The watch measures how long ranks are silent, reports a hang once, and says when the rank continues."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.launch.agent.shared_status import HeartbeatWriter
from paceline.launch.failures.hang_watch import HangWatch, read_hangs
from paceline.launch.failures.rank_observer import RankObserver
from paceline.launch.failures.rank_position import RankPosition
from paceline.launch.failures.stack_dumps import Frame, Stack

RANK = """
import sys, time
from pathlib import Path
from paceline.launch.agent.rank_activity import ActivityReporter, activity_path
ActivityReporter().start(activity_path(Path(sys.argv[1]), int(sys.argv[2])))
time.sleep(600)
"""


class Ranks:
    """Processes that only sleep, and whose heartbeats the test sends."""

    def __init__(self, folder: Path, number: int) -> None:
        self.processes = [
            subprocess.Popen([sys.executable, "-c", RANK, str(folder), str(rank)]) for rank in range(number)
        ]
        self.pages = [HeartbeatWriter(folder / f"pulse-{rank}", start_step=0) for rank in range(number)]
        self.watch = HangWatch(folder)
        while not all((folder / f"activity-{rank}").exists() for rank in range(number)):
            time.sleep(0.05)

    @property
    def pids(self) -> dict[int, int]:
        return {rank: process.pid for rank, process in enumerate(self.processes)}

    def watch_for(self, seconds: float) -> list[str]:
        """What the watch says during this time."""
        end, said = time.monotonic() + seconds, []
        while time.monotonic() < end:
            said.append(self.watch.check(self.pids))
            time.sleep(0.05)
        return [text for text in said if text]

    def beat(self, step: int, ranks: tuple[int, ...] = (0, 1)) -> None:
        for rank in ranks:
            self.pages[rank].write(step=step, total=100)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Ranks]:
    ranks = Ranks(tmp_path, 2)
    yield ranks
    for process in ranks.processes:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


@pytest.mark.clock
def test_a_stopped_rank_is_reported_once_and_continues(two: Ranks, tmp_path: Path) -> None:
    for step in range(1, 5):
        two.beat(step)
        assert two.watch_for(0.4) == []
    os.kill(two.pids[1], signal.SIGSTOP)
    said = two.watch_for(3.0)
    assert len(said) == 1 and "rank 1 is stopped (state T)" in said[0] and f"kill -CONT {two.pids[1]}" in said[0]
    assert [hang["kind"] for hang in read_hangs(tmp_path)] == ["stopped"]
    os.kill(two.pids[1], signal.SIGCONT)
    two.beat(5)
    assert two.watch_for(1.0) == ["rank 1 continues"]
    two.beat(6)
    assert two.watch_for(0.6) == []


@pytest.mark.clock
def test_the_time_of_a_step_is_measured(two: Ranks) -> None:
    for step in range(1, 5):
        two.beat(step)
        two.watch_for(0.3)
    assert two.watch._observer.median_step_seconds == pytest.approx(0.3, abs=0.15)


@pytest.mark.clock
def test_ranks_that_beat_are_left_alone(two: Ranks) -> None:
    for step in range(1, 8):
        two.beat(step)
        assert two.watch_for(0.5) == []


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    assert read_hangs(tmp_path) == []
    (tmp_path / "hangs.jsonl").write_text('{"kind": "code", "ranks": [1]}\n{"kin')
    assert read_hangs(tmp_path) == [{"kind": "code", "ranks": [1]}]


def position(silent: float, *, file: str, state: str = "S") -> RankPosition:
    frame = Frame(file=file, line=1, function="call")
    return RankPosition(rank=0, pid=1, state=state, stack=Stack(frames=(frame,)), silent_seconds=silent)


def test_a_new_activity_starts_the_count_again(tmp_path: Path) -> None:
    watch = RankObserver(tmp_path)
    watch._silent_seconds[0] = 5.0
    slow, busy = "/x/torch/utils/data/dataloader.py", "/home/me/job.py"
    assert watch._stuck_seconds(position(5.0, file=slow), 0.25) == 5.0  # the first look: all of the silence
    assert watch._stuck_seconds(position(5.0, file=slow), 0.25) == 5.25
    assert watch._stuck_seconds(position(5.0, file=busy), 0.25) == 1.0  # a fifth of the silence
    seen = [watch._stuck_seconds(position(5.0, file=busy), 0.25) for _ in range(8)]
    assert seen[-1] == 2.0


def test_a_compilation_is_not_counted(tmp_path: Path) -> None:
    watch = RankObserver(tmp_path)
    watch._silent_seconds[0] = 1.25
    for _ in range(40):
        watch._silent_seconds[0] += 0.25
        watch._stuck_seconds(position(5.0, file="/x/torch/_inductor/compile_fx.py"), 0.25)
    assert watch._silent_seconds[0] <= 1.5


def test_native_code_counts_since_the_page_was_written(tmp_path: Path) -> None:
    """The last page may show that the rank waited or read data, and the count does not start again."""
    watch = RankObserver(tmp_path)
    watch._silent_seconds[0] = 2.0
    waiting = position(2.0, file="/x/torch/distributed/distributed_c10d.py")
    assert watch._stuck_seconds(waiting, 0.25) == 2.0
    assert watch._stuck_seconds(replace(waiting, unwritten_seconds=2.3), 0.25) == 2.3


def test_a_loop_that_changes_between_locks_and_code_is_stuck(tmp_path: Path) -> None:
    watch = RankObserver(tmp_path)
    watch._silent_seconds[0] = 1.0
    files = [threading.__file__, "/home/me/job.py"] * 4
    assert [watch._stuck_seconds(position(1.0, file=file), 0.25) for file in files][-1] == 2.75
