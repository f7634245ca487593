"""`find_hang` names the rank that the others wait for, and says nothing about ranks that may be slow."""

import pdb
import threading
from dataclasses import replace

import pytest

from paceline.launch.failures.hang_diagnosis import Hang, find_hang
from paceline.launch.failures.rank_position import RankPosition
from paceline.launch.failures.stack_dumps import Frame, Stack

USER = Frame(file="/home/me/job.py", line=31, function="loss")
TRAINER = Frame(file="/x/site-packages/paceline/step/synchronous.py", line=90, function="run")


def stack(*files: str) -> Stack:
    """A stack with these files, the innermost first, below Paceline's own step."""
    frames = [Frame(file=file, line=10, function="call") for file in files]
    return Stack(frames=(*frames, TRAINER))


C10D = "/x/site-packages/torch/distributed/distributed_c10d.py"
DATALOADER = "/x/site-packages/torch/utils/data/dataloader.py"
IN_ALL_REDUCE = Stack(frames=(Frame(file=C10D, line=9, function="all_reduce"), TRAINER))
IN_BROADCAST = Stack(frames=(Frame(file=C10D, line=9, function="broadcast"), USER, TRAINER))
IN_LOSS = Stack(frames=(USER, TRAINER))
IN_LOCK = Stack(frames=(Frame(file=threading.__file__, line=320, function="wait"), USER, TRAINER))


def position(
    rank: int,
    at: Stack = IN_ALL_REDUCE,
    *,
    step: int = 12,
    silent: float = 3.0,
    state: str = "S",
    phase: str = "step",
    start_step: int = 0,
    unwritten: float = 0.1,
) -> RankPosition:
    return RankPosition(
        rank=rank, pid=100 + rank, state=state, step=step, start_step=start_step, phase=phase, stack=at,
        silent_seconds=silent, unwritten_seconds=unwritten, num_operations=118, last_operation="all_reduce",
    )  # fmt: skip


def found(*positions: RankPosition, step_seconds: float | None = 0.1) -> Hang:
    hang = find_hang(positions, step_seconds=step_seconds)
    assert hang is not None
    return hang


@pytest.mark.parametrize(
    ("culprit", "kind"),
    [
        (position(1, IN_LOSS), "code"),
        (position(1, IN_LOCK), "lock"),
        (position(1, IN_LOSS, state="T", silent=0.3), "stopped"),
        (position(1, IN_ALL_REDUCE, state="T", silent=0.3), "stopped"),  # it is stopped while it waits itself
        (position(1, IN_LOSS, state="D"), "disk"),
        (position(1, IN_LOSS, unwritten=2.5), "native"),
        (position(1, IN_ALL_REDUCE, unwritten=2.5), "native"),  # the page shows where the rank was before
        (position(1, stack("/home/me/data.py", DATALOADER), silent=10.1), "data"),
        (position(1, stack("/x/site-packages/paceline/data/loader.py"), silent=10.1), "data"),
        (position(1, stack("/x/site-packages/paceline/checkpoint/files/writer.py"), phase="save", silent=61.0), "code"),
        (position(1, IN_LOSS, start_step=12, silent=31.0), "code"),  # in the first step
    ],
)
def test_the_rank_that_the_others_wait_for_is_named(culprit: RankPosition, kind: str) -> None:
    waiting = [position(rank, silent=culprit.silent_seconds) for rank in (0, 2)]
    hang = found(waiting[0], culprit, waiting[1])
    assert hang.kind == kind
    assert [p.rank for p in hang.ranks] == [1] and [p.rank for p in hang.waiting] == [0, 2]
    assert "rank 1 is holding up step 13" in hang.message and "ranks 0 and 2 wait for it in all_reduce" in hang.message


@pytest.mark.parametrize(
    "slow",
    [
        pytest.param(position(1, IN_LOSS, silent=1.9), id="less than two seconds"),
        pytest.param(position(1, stack("/home/me/data.py", DATALOADER), silent=9.0), id="a slow sample"),
        pytest.param(position(1, IN_LOSS, phase="save", silent=50.0), id="a save"),
        pytest.param(position(1, IN_LOSS, phase="on_eval", silent=50.0), id="on_eval"),
        pytest.param(position(1, IN_LOSS, phase="over", silent=5000.0), id="finished"),
        pytest.param(position(1, stack("/x/torch/_inductor/compile_fx.py"), silent=500.0), id="compilation"),
        pytest.param(position(1, IN_LOSS, start_step=12, silent=25.0), id="the first step"),
        pytest.param(position(1, Stack(), step=0, start_step=-1, silent=25.0), id="imports"),
        pytest.param(position(1, IN_LOSS, state="t", silent=500.0), id="a debugger outside"),
        pytest.param(position(1, stack(pdb.__file__, USER.file), silent=500.0), id="pdb"),
        pytest.param(position(1, IN_LOSS, state="Z", silent=500.0), id="ended"),
    ],
)
def test_a_rank_that_may_be_slow_is_not_named(slow: RankPosition) -> None:
    assert find_hang([position(0, silent=slow.silent_seconds), slow], step_seconds=0.1) is None or slow.state == "Z"
    if slow.state == "Z":
        assert find_hang([position(0, silent=1.0), slow], step_seconds=0.1) is None


def test_the_limit_grows_with_the_usual_step() -> None:
    ranks = [position(0, silent=8.0), position(1, IN_LOSS, silent=8.0)]
    assert find_hang(ranks, step_seconds=3.0) is None
    assert found(*ranks, step_seconds=2.5).kind == "code"


def test_without_a_waiting_rank_all_ranks_must_be_late() -> None:
    assert find_hang([position(0, IN_LOSS, silent=29.0), position(1, IN_LOSS, silent=29.0)], step_seconds=0.1) is None
    both = found(position(0, IN_LOSS, silent=31.0), position(1, IN_LOSS, silent=31.0))
    assert [p.rank for p in both.ranks] == [0, 1] and not both.waiting
    assert "on every rank" in both.message and "only this rank" not in both.message
    assert find_hang([position(0, IN_LOSS, silent=0.1), position(1, IN_LOSS, silent=31.0)], step_seconds=0.1) is None


def test_ranks_in_different_collectives_wait_for_each_other() -> None:
    hang = found(position(0, silent=11.0), position(1, IN_BROADCAST, silent=11.0))
    assert hang.kind == "mismatch" and len(hang.ranks) == 2
    for words in ("rank 0 waits for other ranks in all_reduce", "in broadcast", "called from /home/me/job.py:31"):
        assert words in hang.message
    assert find_hang([position(0, silent=9.0), position(1, IN_BROADCAST, silent=9.0)], step_seconds=0.1) is None


def test_ranks_in_the_same_collective_have_lost_their_connection() -> None:
    assert found(position(0, silent=11.0), position(1, silent=11.0)).kind == "connection"
    assert find_hang([position(0, silent=11.0), position(1, silent=11.0)], step_seconds=2.0) is None
    assert find_hang([position(0, silent=11.0)]) is None


def test_only_the_ranks_that_are_furthest_behind_are_named() -> None:
    hang = found(position(0), position(1, IN_LOSS, step=13), position(2, IN_LOSS))
    assert [p.rank for p in hang.ranks] == [2]


def test_a_rank_counts_as_late_only_since_another_waits_for_it() -> None:
    assert find_hang([position(0, silent=0.4), position(1, IN_LOSS, silent=9.0)], step_seconds=0.1) is None
    assert found(position(0, silent=2.1), position(1, IN_LOSS, silent=9.0)).seconds == 2.1


def test_a_file_of_the_job_named_pdb_is_no_debugger() -> None:
    protein = position(1, stack("/home/me/protein/pdb.py"))
    assert not protein.is_debugged and found(position(0), protein).kind == "code"


def test_work_after_the_last_step_may_take_longer() -> None:
    last = replace(position(1, IN_LOSS, silent=50.0), total_steps=12)
    assert find_hang([position(0, silent=50.0), last], step_seconds=0.1) is None
    assert found(position(0, silent=61.0), replace(last, silent_seconds=61.0)).kind == "code"
