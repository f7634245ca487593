"""From where the attempt after a failed one continues, and what it is told about the fault."""

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint.files.checkpoint_folder import step_name
from paceline.launch.agent.shared_status import HeartbeatWriter, read_heartbeat
from paceline.launch.failures.failure_record import Failure
from paceline.launch.launcher import LaunchRequest, _attempt_ended, _restart_request
from paceline.launch.run_outcome import LaunchOutcome
from paceline.launch.several_nodes.attempt_progress import read_progress
from paceline.run_folder.run_folder import RunFolder

KILL = Failure(rank=1, kind="signal", message="SIGKILL (from outside)", step=118, monotonic_ns=5_000)


def save(folder: Path, step: int) -> None:
    (folder / step_name(step)).mkdir(parents=True)
    (folder / "latest").write_text(step_name(step) + "\n")


def restarted(
    run: Path, *, started_from: int | None, reached: int = 0, failure: Failure = KILL, **payload: Any
) -> dict[str, Any]:
    """The payload of the attempt after one that started from a step, or did not get that far, and reached a step."""
    attempt = run / "logs" / "attempt-1"
    attempt.mkdir(parents=True, exist_ok=True)
    (attempt / "pulse-0").unlink(missing_ok=True)
    if started_from is not None:
        page = HeartbeatWriter(attempt / "pulse-0", start_step=started_from)
        page.write(step=reached)
        page.close()
    request = LaunchRequest(ranks=2, run=RunFolder(run), payload=payload)
    progress = read_progress(attempt, range(2))
    outcome = LaunchOutcome(
        exit_code=1, failure=failure, attempt_folder=attempt, seconds=1.0, ranks=2, progress=progress
    )
    end = _attempt_ended(request, outcome)
    found = _restart_request(request, end, failure).payload
    assert found is not None
    json.dumps(found)
    return found


def test_it_continues_from_the_newest_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "checkpoints", 100)
    found = restarted(tmp_path, started_from=0, reached=117, resume=None)
    assert found["resume"] is None
    reason = "rank 1 killed by SIGKILL at step 118"
    assert found["restart"] == {"reason": reason, "failed_step": 118, "monotonic_ns": 5_000, "copies": None}


def test_a_checkpoint_that_the_user_asked_for_is_asked_for_again_until_it_was_restored(tmp_path: Path) -> None:
    """The run has newer ones, which the attempt had no time to set aside."""
    save(tmp_path / "checkpoints", 500)
    older = str(tmp_path / "checkpoints" / step_name(100))
    assert restarted(tmp_path, started_from=None, resume=older)["resume"] == older
    assert restarted(tmp_path, started_from=100, reached=120, resume=older)["resume"] is None


def test_a_branch_starts_again_from_where_it_branched_until_it_has_a_checkpoint_of_its_own(tmp_path: Path) -> None:
    branch, origin = tmp_path / "branch", str(tmp_path / "run" / "checkpoints" / step_name(100))
    (branch / "checkpoints" / ".saving-step-00000110-7").mkdir(parents=True)  # killed while it saved
    assert restarted(branch, started_from=100, reached=110, resume=origin)["resume"] == origin
    save(branch / "checkpoints", 110)
    assert restarted(branch, started_from=100, reached=117, resume=origin)["resume"] is None


def test_a_second_fault_before_any_step_belongs_to_the_first(tmp_path: Path) -> None:
    first = {"reason": "rank 0 killed", "failed_step": 118, "monotonic_ns": 1_000}
    during = Failure(rank=1, kind="signal", message="SIGKILL (from outside)", monotonic_ns=9_000)
    found = restarted(tmp_path, started_from=110, reached=110, failure=during, restart=first)["restart"]
    assert (found["failed_step"], found["monotonic_ns"]) == (118, 1_000)
    assert found["reason"] == "rank 0 killed; then rank 1 killed by SIGKILL"
    found = restarted(tmp_path, started_from=110, reached=120, failure=KILL, restart=first)["restart"]
    assert (found["failed_step"], found["monotonic_ns"]) == (118, 5_000)


def test_the_evaluation_before_the_first_step_is_repeated_only_if_no_step_followed(tmp_path: Path) -> None:
    options = {"evaluate_first": True, "split": "eval"}
    assert restarted(tmp_path, started_from=0, reached=0, options=options)["options"] == options
    assert restarted(tmp_path, started_from=0, reached=3, options=options)["options"] == {"split": "eval"}


@pytest.mark.parametrize("restarts", [0, 3])
def test_a_page_says_what_it_knows_before_its_first_beat(tmp_path: Path, restarts: int) -> None:
    page = HeartbeatWriter(tmp_path / "pulse-0", max_restarts=restarts, start_step=7)
    beat = read_heartbeat(tmp_path / "pulse-0")
    assert beat is not None and (beat.monotonic_ns, beat.max_restarts, beat.start_step) == (0, restarts, 7)
    page.close()
