"""A rank's page says what its main thread executes, and native code that holds the GIL leaves it unwritten."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.bytes_sent import Traffic
from paceline.launch.agent.rank_activity import ActivityReporter, activity_path, read_rank_activity
from paceline.launch.failures.rank_position import observe_rank
from paceline.launch.failures.stack_dumps import Frame

RANK = """
import ctypes, sys, time
from pathlib import Path
from paceline.launch.agent.rank_activity import ActivityReporter, activity_path
ActivityReporter().start(activity_path(Path(sys.argv[1]), 0))
def deep(n):
    return deep(n - 1) if n else {call}
deep({depth})
"""


def start_rank(folder: Path, call: str, *, depth: int = 0) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen([sys.executable, "-c", RANK.format(call=call, depth=depth), str(folder)])
    deadline = time.monotonic() + 20
    while not has_function(folder, "deep") and time.monotonic() < deadline:
        time.sleep(0.05)
    return process


def has_function(folder: Path, name: str) -> bool:
    activity = read_rank_activity(folder, 0)
    return activity is not None and any(frame.function == name for frame in activity.frames)


def test_the_page_has_the_stack_and_the_last_exchange(tmp_path: Path) -> None:
    reporter = ActivityReporter()
    reporter.traffic = Traffic(num_operations=7, last_operation="broadcast")
    reporter.start(activity_path(tmp_path, 3))
    activity = read_rank_activity(tmp_path, 3)
    assert activity is not None
    assert activity.num_operations == 7 and activity.last_operation == "broadcast"
    assert any(frame.file == __file__ for frame in activity.frames)
    assert read_rank_activity(tmp_path, 4) is None


def test_a_deep_stack_keeps_its_innermost_frames(tmp_path: Path) -> None:
    process = start_rank(tmp_path, "time.sleep(60)", depth=900)
    activity = read_rank_activity(tmp_path, 0)
    process.kill()
    process.wait()
    assert activity is not None and activity.frames[0].function == "deep" and len(activity.frames) <= 60


@pytest.mark.parametrize("position", [0, 5, 9, 60])
def test_half_a_page_is_not_read(tmp_path: Path, position: int) -> None:
    ActivityReporter().start(activity_path(tmp_path, 0))
    path = activity_path(tmp_path, 1)
    data = bytearray(activity_path(tmp_path, 0).read_bytes())
    path.write_bytes(data)
    assert read_rank_activity(tmp_path, 1) is not None
    data[position] ^= 1
    path.write_bytes(data)
    assert read_rank_activity(tmp_path, 1) is None


def test_no_space_for_the_page_is_no_error(tmp_path: Path) -> None:
    ActivityReporter().start(activity_path(tmp_path / "missing", 0))
    assert read_rank_activity(tmp_path / "missing", 0) is None


@pytest.mark.clock
@pytest.mark.parametrize(
    ("call", "holds_gil"),
    [("ctypes.PyDLL(None).sleep(60)", True), ("ctypes.CDLL(None).sleep(60)", False)],
)
def test_native_code_that_holds_the_gil_is_recognized(tmp_path: Path, call: str, holds_gil: bool) -> None:
    process = start_rank(tmp_path, f"(time.sleep(1), {call})")
    time.sleep(4)
    position = observe_rank(tmp_path, 0)
    process.kill()
    process.wait()
    assert position.holds_gil is holds_gil, position


@pytest.mark.clock
def test_a_stopped_process_does_not_count_as_one_that_holds_the_gil(tmp_path: Path) -> None:
    process = start_rank(tmp_path, "time.sleep(60)")
    process.send_signal(signal.SIGSTOP)
    time.sleep(3)
    position = observe_rank(tmp_path, 0)
    process.kill()
    process.wait()
    assert position.is_stopped and not position.holds_gil and position.doing == "is stopped (state T)"


RANK_OF_TWO = """
import os, sys, time
from pathlib import Path
import torch, torch.distributed as dist
from paceline.launch.agent.rank_activity import activity_path, activity_reporter
from paceline.torch_internals.flight_recorder import unfinished_collectives
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=rank, world_size=2)
activity_reporter.list_unfinished = unfinished_collectives
activity_reporter.start(activity_path(Path(sys.argv[1]), rank))
for _ in range(3):
    dist.all_reduce(torch.ones(5))
if rank == 0:
    dist.all_reduce(torch.ones(64, 2))
time.sleep(60)
"""


@pytest.mark.clock
def test_a_collective_that_paceline_did_not_start_is_read_from_the_flight_recorder(tmp_path: Path) -> None:
    """The rank that waits says in which one, with its size; the other one, in code of its own, says nothing."""
    ranks = [subprocess.Popen([sys.executable, "-c", RANK_OF_TWO, str(tmp_path), str(rank)]) for rank in range(2)]
    deadline, doing = time.monotonic() + 40, ""
    while "number 4" not in doing and time.monotonic() < deadline:
        time.sleep(0.1)
        doing = observe_rank(tmp_path, 0, pid=ranks[0].pid).doing
    other = observe_rank(tmp_path, 1, pid=ranks[1].pid)
    for process in ranks:
        process.kill()
        process.wait()
    assert doing.startswith("waits for other ranks in all_reduce (all_reduce of [64, 2] float, number 4 in its group)")
    assert other.unfinished == () and not other.is_waiting_for_ranks


def test_a_flight_recorder_that_fails_is_left_alone(tmp_path: Path) -> None:
    calls = []

    def fail() -> list[str]:
        calls.append(1)
        raise RuntimeError("another version of torch")

    reporter = ActivityReporter()
    reporter.list_unfinished = fail
    frames = (Frame(file="/x/torch/distributed/distributed_c10d.py", line=1, function="all_reduce"),)
    for _ in range(9):
        reporter._update_unfinished((frames, 3))
    assert calls == [1] and reporter._unfinished == ()
