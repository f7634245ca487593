"""When a run continues with fewer ranks, and when it grows again: the decisions, without a process or a clock."""

from dataclasses import replace

import pytest

from paceline.cli import expand_rank_range
from paceline.errors import ExitCode
from paceline.launch.agent.restart_policy import (
    AttemptEnded,
    EndRun,
    PrintLine,
    RestartPolicy,
    RunRequested,
    SaveCompleted,
    StartAttempt,
    StopAttempt,
    StopRequested,
    TimePassed,
)
from paceline.launch.failures.failure_record import Failure

KILL = Failure(rank=3, kind="signal", message="SIGKILL (killed from outside)", screen="killed", step=21)
STOPPED = AttemptEnded(
    exit_code=ExitCode.STOPPED, failure=None, has_started=True, start_step=20, reached_step=40, saved_step=40, time=0.0
)


def lost(time: float, failure: Failure = KILL, *, reached: int = 20, code: int = 1) -> AttemptEnded:
    """The end of an attempt that began at step 20; without `reached`, before it completed a step."""
    return AttemptEnded(
        exit_code=code, failure=failure, has_started=True, start_step=20, reached_step=reached, saved_step=20, time=time
    )


def started(*counts: int, replace_seconds: float = 10.0) -> RestartPolicy:
    policy = RestartPolicy()
    first = policy.handle(RunRequested(can_restart=True, rank_counts=counts, replace_seconds=replace_seconds))
    assert first == [StartAttempt(ranks=counts[0])]
    return policy


def lose_rank(policy: RestartPolicy, *, begin: float = 0.0, reached: int = 25) -> str:
    """A rank is killed in step 25, and its replacements at once, until the policy chooses fewer ranks."""
    assert policy.handle(lost(begin, reached=reached)) == [StartAttempt(after=KILL, ranks=4)]
    time = begin
    while True:
        line, *rest = policy.handle(lost(time + 0.1))
        time += 1.0
        if rest and isinstance(rest[-1], StartAttempt) and rest[-1].ranks != 4:
            assert isinstance(line, PrintLine) and rest == [StartAttempt(after=KILL, ranks=3)]
            assert time > begin + 10.0
            return line.text
        policy.handle(TimePassed(time=time + 60))
        assert time < begin + 30.0


def test_a_rank_whose_replacements_fail_for_long_is_lost() -> None:
    text = lose_rank(started(4, 3, 2))
    assert text.endswith("rank 3 could not be replaced; continuing with 3 ranks of 4"), text


def test_one_kill_or_a_kill_of_another_rank_loses_none() -> None:
    policy = started(4, 3, replace_seconds=0.0)
    for failure in (KILL, replace(KILL, rank=1), KILL):
        actions = policy.handle(lost(1.0, failure))
        actions = actions if isinstance(actions[0], StartAttempt) else policy.handle(TimePassed(time=99.0))
        assert actions == [StartAttempt(after=failure, ranks=4)]
        policy.handle(lost(2.0, failure, reached=25))  # all ranks worked


def test_without_fewer_ranks_the_limit_of_restarts_ends_the_run() -> None:
    policy = RestartPolicy()
    assert policy.handle(RunRequested(can_restart=True)) == [StartAttempt()]
    for number in range(3):
        policy.handle(lost(float(number)))
        policy.handle(TimePassed(time=number + 60.0))
    (last,) = policy.handle(lost(9.0))
    assert isinstance(last, EndRun) and "3 restarts without a new checkpoint" in last.reason


def test_a_run_with_the_fewest_ranks_ends_after_the_limit() -> None:
    policy = started(2, 1, replace_seconds=0.0)
    policy.handle(lost(0.0))
    assert policy.handle(lost(1.0))[-1] == StartAttempt(after=KILL, ranks=1)
    for number in range(3):
        policy.handle(lost(2.0 + number))
        policy.handle(TimePassed(time=99.0))
    assert isinstance(policy.handle(lost(9.0))[-1], EndRun)


def test_a_missing_device_is_waited_for_and_then_given_up() -> None:
    missing = replace(KILL, kind="RuntimeError", message="CUDA error: invalid device ordinal")
    policy = started(4, 3, replace_seconds=1.0)
    assert policy.handle(lost(0.0, missing)) == [StartAttempt(after=missing, ranks=4)]
    assert policy.handle(lost(0.5, missing)) == [StartAttempt(after=missing, ranks=4)]
    assert policy.handle(lost(1.5, missing))[-1] == StartAttempt(after=missing, ranks=3)
    fixed = RestartPolicy()
    fixed.handle(RunRequested(can_restart=True))
    assert fixed.handle(lost(0.0, missing)) == [EndRun()], "without fewer ranks, it is an error of the start"


def test_a_number_that_the_job_refuses_is_left_out() -> None:
    policy = started(4, 3, 2, replace_seconds=0.0)
    policy.handle(lost(0.0))
    policy.handle(lost(1.0))
    refusal = replace(KILL, kind="LayoutError", message="16 samples can't be divided by 3")
    line, start = policy.handle(lost(2.0, refusal, code=ExitCode.REFUSED))
    assert start == StartAttempt(after=refusal, ranks=2) and "does not fit the job" in line.text  # type: ignore[union-attr]
    assert isinstance(policy.handle(lost(3.0, refusal, code=ExitCode.REFUSED))[-1], EndRun)


def test_the_run_grows_at_a_save_and_waits_longer_after_each_failed_try() -> None:
    policy = started(4, 3)
    lose_rank(policy)
    assert policy.waits_for_save
    assert policy.handle(SaveCompleted(time=50.0)) == []
    line, stop = policy.handle(SaveCompleted(time=80.0))
    assert stop == StopAttempt() and "4 ranks instead of 3" in line.text  # type: ignore[union-attr]
    assert not policy.waits_for_save
    assert policy.handle(replace(STOPPED, time=81.0)) == [StartAttempt(ranks=4)]
    assert policy.handle(lost(82.0))[-1] == StartAttempt(after=KILL, ranks=3), "the first failure of a try ends it"
    assert policy.handle(SaveCompleted(time=82.0 + 100.0)) == []
    assert policy.handle(SaveCompleted(time=82.0 + 125.0))[-1] == StopAttempt()


def test_a_run_that_has_grown_starts_again_from_the_first_wait() -> None:
    policy = started(4, 3)
    lose_rank(policy)
    policy.handle(SaveCompleted(time=80.0))
    policy.handle(replace(STOPPED, time=81.0))
    assert not policy.waits_for_save
    lose_rank(policy, begin=500.0, reached=60)
    assert policy.handle(SaveCompleted(time=585.0))[-1] == StopAttempt()


@pytest.mark.parametrize("end", [replace(STOPPED, exit_code=ExitCode.DONE), STOPPED])
def test_a_run_that_is_done_or_that_a_user_stops_does_not_grow(end: AttemptEnded) -> None:
    policy = started(4, 3)
    lose_rank(policy)
    policy.handle(SaveCompleted(time=80.0))
    if end.exit_code == ExitCode.STOPPED:
        policy.handle(StopRequested())
    assert policy.handle(end) == [EndRun()]


@pytest.mark.parametrize(("words", "expanded"), [
    (["job.py", "--ranks", "2:4"], ["job.py", "--ranks", "4", "--survive.min_ranks", "2"]),
    (["--ranks=2:4", "job.py"], ["--ranks=4", "job.py", "--survive.min_ranks", "2"]),
    (["--ranks", "4", "--data.path", "2:4"], ["--ranks", "4", "--data.path", "2:4"]),
    (["--faults", "kill rank=1 step=2"], ["--faults", "kill rank=1 step=2"]),
])  # fmt: skip
def test_a_range_of_ranks_is_a_setting(words: list[str], expanded: list[str]) -> None:
    assert expand_rank_range(words) == expanded
