"""The decisions about restarts: which failures are followed by another attempt, how soon, and how often."""

from dataclasses import replace

import pytest

from paceline.errors import ExitCode, RollbackError
from paceline.launch.agent.restart_policy import (
    Action,
    AttemptEnded,
    EndRun,
    NodesChange,
    PrintLine,
    RestartPolicy,
    RunRequested,
    StartAttempt,
    StopAttempt,
    StopRequested,
    TimePassed,
)
from paceline.launch.failures.failure_record import FORKSERVER_RANK, Failure

KILL = Failure(rank=2, kind="signal", message="SIGKILL (killed from outside: ...)", step=118)
BUG = Failure(rank=1, kind="ValueError", message="bad sample", step=118, is_users_own=True)


def started(*, can_restart: bool = True, max_restarts: int = 3) -> RestartPolicy:
    policy = RestartPolicy()
    requested = RunRequested(can_restart=can_restart, max_restarts=max_restarts)
    assert policy.handle(requested) == [StartAttempt()]
    return policy


def end(
    failure: Failure | None, *, saved: int = 100, start: int = 0, reached: int = 117, code: int = 1, time: float = 0.0
) -> AttemptEnded:
    return AttemptEnded(
        exit_code=code, failure=failure, has_started=True, start_step=start, reached_step=reached, saved_step=saved,
        time=time,
    )  # fmt: skip


def is_over(actions: list[Action]) -> bool:
    return len(actions) == 1 and isinstance(actions[0], EndRun)


def test_a_killed_rank_is_followed_by_an_attempt_at_once() -> None:
    assert started().handle(end(KILL)) == [StartAttempt(after=KILL)]


def test_on_several_nodes_a_line_is_printed_before_each_restart_also_before_an_immediate_one() -> None:
    policy = RestartPolicy()
    policy.handle(RunRequested(can_restart=True, max_restarts=3, max_node_restarts=0))
    lines = []
    for attempt in range(3):
        kill = replace(KILL, step=KILL.step + attempt)
        lines += [action.text for action in policy.handle(end(kill)) if isinstance(action, PrintLine)]
        policy.handle(TimePassed(time=10.0))
    assert [line.partition("; ")[2] for line in lines] == [
        "restarting (restart 1 of 3 without a new checkpoint)",
        "restarting (restart 2 of 3 without a new checkpoint)",
        "restarting in 1 s (restart 3 of 3 without a new checkpoint)",
    ]
    rollback = replace(KILL, kind=RollbackError.__name__)
    actions = policy.handle(end(rollback))
    assert actions == [PrintLine(text=f"{rollback.summary}; restarting"), StartAttempt(after=rollback)]


@pytest.mark.parametrize("code", [ExitCode.DONE, ExitCode.STOPPED, ExitCode.INTERRUPTED])
def test_a_run_without_a_failure_is_over(code: ExitCode) -> None:
    assert started().handle(end(None, code=code)) == [EndRun()]


def test_a_command_that_saves_nothing_is_not_restarted() -> None:
    assert started(can_restart=False).handle(end(KILL)) == [EndRun()]


@pytest.mark.parametrize("told", [False, True])
def test_no_restart_where_the_setting_is_zero(told: bool) -> None:
    """The setting of the command, or the one of the job, which only the ranks know."""
    policy = started(max_restarts=3 if told else 0)
    assert policy.handle(replace(end(KILL), max_restarts=0 if told else None)) == [EndRun()]


def test_restarts_without_a_new_checkpoint_wait_longer_and_longer_and_then_stop() -> None:
    policy, now, waits = started(max_restarts=5), 0.0, []
    for _ in range(5):
        actions = policy.handle(end(KILL, time=now))
        begun = now
        while not isinstance(actions[-1], StartAttempt):
            assert all(isinstance(action, PrintLine) for action in actions)
            now += 0.5
            actions = policy.handle(TimePassed(time=now)) or actions[:1]
        waits.append(now - begun)
    assert waits == [0.0, 0.0, 1.0, 2.0, 4.0]
    (last,) = policy.handle(end(KILL, time=now))
    assert isinstance(last, EndRun) and "5 restarts without a new checkpoint" in last.reason


def test_a_new_checkpoint_makes_all_restarts_available_again() -> None:
    policy = started(max_restarts=1)
    for saved in range(100, 2000, 100):
        assert policy.handle(end(KILL, saved=saved)) == [StartAttempt(after=KILL)]
    assert is_over(policy.handle(end(KILL, saved=1900)))


def test_an_older_newest_checkpoint_is_no_progress() -> None:
    """A damaged one was passed over, and the run saved at an earlier step again."""
    policy = started(max_restarts=1)
    assert policy.handle(end(KILL, saved=200)) == [StartAttempt(after=KILL)]
    assert is_over(policy.handle(end(KILL, saved=100)))


def test_the_job_s_own_error_is_tried_once_more_and_then_shown() -> None:
    policy = started()
    assert policy.handle(end(BUG)) == [StartAttempt(after=BUG)]
    (last,) = policy.handle(end(replace(BUG, rank=3), saved=110))
    assert isinstance(last, EndRun) and "same error at step 118" in last.reason


def test_a_crash_of_native_code_at_the_same_step_is_the_job_s_own_error() -> None:
    crash, policy = replace(KILL, message="SIGSEGV (a crash in native code)"), started()
    assert policy.handle(end(crash)) == [StartAttempt(after=crash)]
    assert is_over(policy.handle(end(crash)))


def test_an_error_at_another_step_or_with_another_text_is_another_error() -> None:
    for other in (replace(BUG, step=119), replace(BUG, message="another")):
        policy = started()
        policy.handle(end(BUG))
        assert policy.handle(end(other)) == [StartAttempt(after=other)]


@pytest.mark.parametrize(("step", "start"), [(0, 0), (1, 0), (101, 100)])
def test_an_error_before_any_step_is_complete_is_shown_at_once(step: int, start: int) -> None:
    assert started().handle(end(replace(BUG, step=step), saved=start, start=start, reached=start)) == [EndRun()]


def test_an_error_outside_of_a_step_is_tried_once_more() -> None:
    """As of a script's own code between two steps, which says no step."""
    policy, outside = started(), replace(BUG, step=0)
    assert policy.handle(end(outside)) == [StartAttempt(after=outside)]
    (last,) = policy.handle(end(outside))
    assert isinstance(last, EndRun) and "the same error after step 117" in last.reason


WORDS_WITH_NUMBERS = {
    "NonFiniteError": ("the loss at step 118 is nan.", "the loss at step 118 is nan."),
    "timeout": ("no answer from rank 2 within 600 s: its process 871 is stopped", "no answer from rank 2: it computes"),
    "DataError": ("a data worker died: worker (pid 4711) is killed", "a data worker died: worker (pid 4800) is killed"),
}


@pytest.mark.parametrize("kind", WORDS_WITH_NUMBERS)
def test_the_same_error_with_other_numbers_is_tried_once_more_and_no_longer(kind: str) -> None:
    first, second = (replace(BUG, kind=kind, message=message) for message in WORDS_WITH_NUMBERS[kind])
    policy = started()
    assert policy.handle(end(first)) == [StartAttempt(after=first)]
    assert is_over(policy.handle(end(second)))


@pytest.mark.parametrize("kind", ["SpikeError", "SaveError", "MissedFaultError"])
def test_errors_that_a_restart_repeats_are_shown_at_once(kind: str) -> None:
    assert started().handle(end(replace(BUG, kind=kind))) == [EndRun()]


def test_a_refusal_is_shown_at_once() -> None:
    refused = replace(BUG, kind="JobError")
    assert started().handle(end(refused, code=ExitCode.REFUSED)) == [EndRun()]


def test_memory_that_ran_out_is_tried_again_only_after_progress() -> None:
    full = replace(KILL, said={"error": "OutOfMemory"})
    assert started().handle(end(full, saved=100, start=100)) == [EndRun()]
    assert started().handle(end(full, saved=110, start=100)) == [StartAttempt(after=full)]


@pytest.mark.parametrize("failure", [
    replace(KILL, step=0),
    replace(KILL, rank=FORKSERVER_RANK, kind="exit", step=0),
    replace(KILL, kind="timeout", message="no answer from rank 2"),
    replace(KILL, kind="PeerError", message="the connection was lost", step=0),
    replace(BUG, kind="DataError", message="a data worker died: worker (pid 7) is killed by signal: Killed.", step=0),
])  # fmt: skip
def test_a_cause_outside_the_job_is_tried_again_even_before_the_first_step(failure: Failure) -> None:
    assert started().handle(end(failure, reached=0)) == [StartAttempt(after=failure)]


def test_a_stop_ends_the_run_with_its_attempt_or_in_the_pause_before_the_next_one() -> None:
    policy = started()
    assert policy.handle(StopRequested()) == []
    assert policy.handle(end(KILL)) == [EndRun(reason="Not restarted: a stop was requested.")]
    policy = started()
    for _ in range(2):
        assert policy.handle(end(KILL)) == [StartAttempt(after=KILL)]
    (wait,) = policy.handle(end(KILL))
    assert isinstance(wait, PrintLine) and "restarting in 1 s (restart 3 of 3" in wait.text
    assert policy.handle(TimePassed(time=0.9)) == []
    assert policy.handle(StopRequested()) == [EndRun(reason="Not restarted: a stop was requested.")]


@pytest.mark.parametrize(("failure", "text"), [
    (KILL, "rank 2 killed by SIGKILL at step 118"),
    (replace(KILL, step=0), "rank 2 killed by SIGKILL"),
    (replace(KILL, said={"error": "OutOfMemory"}), "rank 2 killed by SIGKILL (out of memory) at step 118"),
    (BUG, "rank 1 failed at step 118: ValueError: bad sample"),
    (replace(BUG, where="job.py:12"), "rank 1 failed at step 118: ValueError: bad sample (job.py:12)"),
    (replace(BUG, kind="timeout", message="no answer from rank 1: it is stopped"),
     "rank 1 failed at step 118: no answer from rank 1: it is stopped"),
    (replace(KILL, rank=FORKSERVER_RANK), "the process that starts the ranks ended at step 118"),
])  # fmt: skip
def test_a_failure_in_one_line(failure: Failure, text: str) -> None:
    assert failure.summary == text


def test_a_rollback_restarts_at_once_and_is_not_counted() -> None:
    policy = started(max_restarts=0)
    rollback = Failure(rank=0, kind="RollbackError", message="step 30: its 12 samples are left out", step=30)
    for _ in range(6):
        assert policy.handle(end(rollback, saved=20, start=20, reached=29)) == [StartAttempt(after=rollback)]
    spike = replace(rollback, kind="SpikeError")
    assert is_over(policy.handle(end(spike)))


def test_a_wrong_copy_in_the_first_step_restarts_only_a_resumed_attempt() -> None:
    wrong = Failure(rank=1, kind="DesyncError", message="the replicas are no longer equal", step=11)
    assert started().handle(end(wrong, start=10, reached=10, saved=10)) == [StartAttempt(after=wrong)]
    assert is_over(started().handle(end(replace(wrong, step=1), start=0, reached=0, saved=0)))


def test_an_attempt_that_stops_for_other_nodes_is_followed_by_one_on_them() -> None:
    policy = started()
    change = NodesChange(reason="node 2 (host2) has come")
    assert policy.handle(change) == [PrintLine(text="node 2 (host2) has come"), StopAttempt()]
    assert policy.handle(change) == []  # it is said once
    assert policy.handle(end(None, code=ExitCode.STOPPED)) == [StartAttempt()]
    assert policy.handle(end(None, code=ExitCode.STOPPED)) == [EndRun()]


def test_a_stop_request_counts_more_than_a_change_of_nodes() -> None:
    policy = started()
    policy.handle(NodesChange(reason="node 2 (host2) has come"))
    policy.handle(StopRequested())
    assert policy.handle(end(None, code=ExitCode.STOPPED)) == [EndRun()]
    asked = started()
    asked.handle(StopRequested())
    assert asked.handle(NodesChange(reason="node 2 (host2) has come")) == []


def test_a_failure_while_the_nodes_change_restarts_as_any_other() -> None:
    policy = started()
    policy.handle(NodesChange(reason="node 2 (host2) has come"))
    assert policy.handle(end(KILL)) == [StartAttempt(after=KILL)]
    assert policy.handle(end(None, code=ExitCode.STOPPED)) == [EndRun()]


def test_a_number_of_nodes_that_the_job_refuses_is_followed_by_another_one() -> None:
    refusal = Failure(rank=1, kind="LayoutError", message="6 stages, but the model has only 4 blocks")
    refused = end(refusal, code=ExitCode.REFUSED, start=100, reached=100)
    assert is_over(started().handle(refused))
    line, again = started().handle(replace(refused, is_wrong_size=True))
    assert isinstance(line, PrintLine) and "does not fit the job" in line.text
    assert again == StartAttempt(after=refusal)
