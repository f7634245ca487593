"""When a run continues with fewer ranks, and when it grows again: the decisions, without a process or a clock."""

from dataclasses import replace

import pytest
import torch

from paceline.cli import expand_rank_range
from paceline.comm import process_group
from paceline.errors import ExitCode, MachineError
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


def restart_until_the_end(policy: RestartPolicy, *failures: Failure, reached: int = 20) -> tuple[int, float]:
    """The failures follow each other, a second apart. Return the last number of ranks, and the time of the end."""
    ranks, time = 4, 0.0
    for number in range(100):
        actions = policy.handle(lost(time, failures[number % len(failures)], reached=reached))
        time += 1.0
        while not isinstance(actions[-1], StartAttempt | EndRun):
            time += 0.5
            actions = [*actions, *policy.handle(TimePassed(time=time))]
        if isinstance(actions[-1], EndRun):
            return ranks, time
        ranks = actions[-1].ranks
    raise AssertionError("the run restarts without end")


def test_one_failure_before_a_step_loses_no_rank() -> None:
    policy = started(4, 3, replace_seconds=0.0)
    for number in range(3):
        actions = policy.handle(lost(number + 0.1))
        actions = actions if isinstance(actions[0], StartAttempt) else policy.handle(TimePassed(time=99.0))
        assert actions == [StartAttempt(after=KILL, ranks=4)]
        policy.handle(replace(lost(number + 0.2, reached=25), saved_step=30 + number))  # all ranks worked


def test_ranks_that_fail_in_turn_are_lost_too_and_the_run_ends_with_the_fewest() -> None:
    ranks, time = restart_until_the_end(started(4, 3), KILL, replace(KILL, rank=2))
    assert ranks == 3 and 10.0 < time < 60.0


def test_failures_after_a_step_or_of_the_fork_server_end_the_run_as_without_fewer_ranks() -> None:
    assert restart_until_the_end(started(4, 3), KILL, reached=21)[0] == 4
    assert restart_until_the_end(started(4, 3), replace(KILL, rank=-1))[0] == 4
    error = replace(KILL, kind="ValueError", message="no")
    errors = [replace(error, step=step) for step in range(21, 40)]
    assert restart_until_the_end(started(4, 3), *errors, reached=21)[0] == 4


@pytest.mark.parametrize("code", [1, ExitCode.REFUSED])
def test_any_error_of_a_try_to_grow_ends_only_the_try(code: int) -> None:
    policy = started(4, 3)
    lose_rank(policy)
    policy.handle(SaveCompleted(time=80.0))
    policy.handle(replace(STOPPED, time=81.0))
    error = replace(KILL, kind="RuntimeError", message="something of the driver")
    assert policy.handle(lost(82.0, error, code=code))[-1] == StartAttempt(after=error, ranks=3)


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


def test_a_missing_device_is_waited_for_and_then_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(MachineError) as raised:
        process_group._device("cuda", 3)
    missing = replace(KILL, kind="MachineError", message=raised.value.what)
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
    (["job.py", "--ranks", "2:4"], (["job.py", "--ranks", "4"], ["--survive.min_ranks", "2"])),
    (["--ranks=2:4", "job.py"], (["--ranks=4", "job.py"], ["--survive.min_ranks", "2"])),
    (["--ranks", "4", "--run-dir", "2:4"], (["--ranks", "4", "--run-dir", "2:4"], [])),
    (["--faults", "kill rank=1 step=2"], (["--faults", "kill rank=1 step=2"], [])),
])  # fmt: skip
def test_a_range_of_ranks_is_a_setting(words: list[str], expanded: tuple[list[str], list[str]]) -> None:
    assert expand_rank_range(words) == expanded
