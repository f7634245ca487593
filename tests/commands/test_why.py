"""`paceline why` explains runs that hang, failed, were killed or are done."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.commands.why import explain_run
from paceline.errors import UsageError
from paceline.launch.agent.rank_activity import ActivityReporter
from paceline.reporting.run_history import read_history
from paceline.reporting.run_report import run_status
from paceline.run_folder.run_folder import RunFolder
from tests.conftest import SMALL_JOB, Shop

LOSS = '    time.sleep(float(os.environ.get("PAUSE", 0)))\n'
STUCK = SMALL_JOB.replace(
    LOSS, f"{LOSS}    if os.environ.get('STUCK') == os.environ['RANK']: time.sleep(3600)  # here\n"
)
LINE = f"job.py:{1 + STUCK[: STUCK.index('# here')].count(chr(10))}"


def wait_until(shop: Shop, run: str, state: str) -> Any:
    """What `why --json` says once the run is in this state."""
    deadline = time.monotonic() + 60
    while True:
        ended = shop.run("why", run, "--json")
        if ended.code == 0 and ended.json()["state"] == state:
            return ended.json()
        assert time.monotonic() < deadline, ended.text
        time.sleep(0.2)


@pytest.fixture
def hanging(shop: Shop) -> "subprocess.Popen[str]":
    """A run of two ranks, whose rank 1 hangs in its second step."""
    shop.write("job.py", STUCK.replace("if os", "if len(batch[0]) and next(calls) == 2 and os") + CALLS)
    return shop.start("train", "job.py", "--ranks", "2", "--run-dir", "run", "--train.steps", "9",
                      "--watch.to", "console", environ={"STUCK": "1"})  # fmt: skip


CALLS = "import itertools\ncalls = itertools.count(1)\n"


def test_a_rank_that_hangs_is_named_within_seconds(shop: Shop, hanging: "subprocess.Popen[str]") -> None:
    assert hanging.stderr is not None
    message = ""
    while "to do:" not in message:
        line = hanging.stderr.readline()
        assert line, message
        message += line
    assert "rank 1 is holding up step 2" in message and LINE in message, message
    assert "rank 0 waits for it in all_reduce" in message
    seen = wait_until(shop, "run", "hanging")
    assert seen["hang"]["kind"] == "code" and seen["hang"]["ranks"] == [1] and seen["hang"]["waiting"] == [0]
    assert LINE in seen["hang"]["line"] and seen["ranks"][0]["operation"] == "all_reduce" and seen["step"] == 1
    assert "likely cause" in shop.run("why", "run").out
    os.kill(hanging.pid, signal.SIGKILL)
    ended = wait_until(shop, "run", "killed")
    assert LINE in ended["ranks"][1]["line"] and ended["go_on"].startswith("paceline train job.py --run-dir run")
    assert "ended without a message" in shop.run("why", "run").out


def test_a_failure_is_explained_with_what_followed_from_it(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB)
    ended = shop.train("runs/job/a", "--faults", "raise rank=1 step=3", "--survive.restarts", "0", steps=5)
    assert ended.code == 1
    seen = shop.run("why", "runs/job/a", "--json").json()
    assert seen["follow_up"] == [{"rank": 0, "what": "rank 0 lost the connection to another rank"}]
    assert seen["state"] == "failed" and seen["failure"]["rank"] == 1 and seen["failure"]["step"] == 3
    text = shop.run("why", "runs/job/a").out
    assert ended.err[ended.err.index("FAILED") :].strip().splitlines()[0] in text
    assert shop.run("why").out == text


def test_restarts_and_the_end_of_a_run_are_listed(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB)
    assert shop.train("run", "--faults", "kill rank=1 step=3", "--checkpoint.every", "1", steps=5).code == 0
    seen = shop.run("why", "run", "--json").json()
    assert seen["state"] == "done" and seen["step"] == 5 and seen["attempt"] == 2 and seen["failure"] is None
    assert len(seen["restarts"]) == 1
    assert seen["restarts"][0].startswith("attempt 1: rank 1 killed by SIGKILL at step 3; restarted in")


def test_a_run_that_was_moved_is_resumed_where_it_is(shop: Shop) -> None:
    shop.write("job.py", SMALL_JOB)
    assert shop.train("run", "--faults", "stop rank=0 step=3", steps=5).code == 75
    (shop.path / "run").rename(shop.path / "moved")
    assert "--run-dir moved " in shop.run("why", "moved", "--json").json()["go_on"] + " "


def _run_folder(folder: Path) -> Path:
    (folder / "logs" / "attempt-1").mkdir(parents=True)
    return folder


@pytest.mark.parametrize(("has_weights", "state"), [(True, "done"), (False, "unknown")])
def test_a_run_whose_events_are_lost_was_not_killed(tmp_path: Path, has_weights: bool, state: str) -> None:
    run = _run_folder(tmp_path)
    (run / "events.jsonl").touch()
    assert explain_run(str(run)).state == "killed", "before its first event"
    (run / "metrics.jsonl").write_text(json.dumps({"step": 3, "loss": 1.0}) + "\n")
    if has_weights:
        (run / "weights.json").write_text("{}")
    explanation = explain_run(str(run))
    assert explanation.state == state
    assert ("is not known how the run ended" in explanation.text) == (not has_weights)


def test_a_run_that_can_not_be_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run_folder(tmp_path)
    iterate = Path.iterdir

    def refuse(path: Path) -> Iterator[Path]:
        if path == run / "logs":
            raise PermissionError(13, os.strerror(13), str(path))
        return iterate(path)

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UsageError, match="logs can't be read: Permission denied"):
        explain_run(str(run))


@pytest.mark.parametrize("request_text", ["[1, 2]", "5", '{"ranks": "abc"}', '{"ranks": [1]}'])
def test_a_damaged_request_does_not_hide_a_failure(tmp_path: Path, request_text: str) -> None:
    run = _run_folder(tmp_path)
    (run / "logs" / "attempt-1" / "request.json").write_text(request_text)
    failure = {"rank": 1, "kind": "ValueError", "message": "bad", "exit_code": 1}
    (run / "logs" / "attempt-1" / "first-failure.json").write_text(json.dumps(failure))
    (run / "logs" / "attempt-1" / "rank-0.log").touch()
    (run / "events.jsonl").write_text(json.dumps({"event": "RunStarted", "attempt": 1}) + "\n")
    (run / ".lock").write_text("[" * 5000)
    explanation = explain_run(str(run))
    assert explanation.state == "failed" and explanation.outcome is not None and explanation.outcome.ranks == 1


@pytest.fixture
def distant(tmp_path: Path) -> Path:
    """A run that a command on another machine has started."""
    run = _run_folder(tmp_path)
    elsewhere = {"host": "elsewhere", "machine": "another boot", "pid": os.getpid(), "born": "1"}
    (run / ".lock").write_text(json.dumps(elsewhere))
    events = [{"event": "RunStarted", "attempt": 1}, {"event": "StepDone", "step": 40}]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run


def silence(run: Path, *, seconds: float) -> None:
    """Let all files of a run be this old."""
    for path in [run, *run.rglob("*")]:
        os.utime(path, (time.time() - seconds,) * 2)


def test_a_run_on_another_machine_is_running_as_long_as_it_writes(distant: Path) -> None:
    silence(distant, seconds=500)
    (distant / "logs" / "attempt-1" / "rank-0.log").touch()
    explanation = explain_run(str(distant))
    assert (explanation.state, explanation.step) == ("running", 40)
    assert "the last sign of life is 0 s old; the same command on elsewhere shows what its" in explanation.text
    assert "its ranks are starting" not in explanation.text
    assert run_status(read_history(RunFolder(distant))) == "running"


def test_a_silent_run_of_another_machine_is_not_said_to_run(distant: Path) -> None:
    silence(distant, seconds=240)
    explanation = explain_run(str(distant))
    assert (explanation.state, explanation.step) == ("unknown", 40)
    assert "no sign of life for 240 s; if it still runs, the same command on elsewhere shows" in explanation.text
    assert explanation.as_json()["not_seen"] == list(explanation.distant_lines)
    assert run_status(read_history(RunFolder(distant))) == "no sign of life for 240 s"


def test_a_lost_head_is_told_on_another_machine(distant: Path) -> None:
    attempt = distant / "logs" / "attempt-1"
    (attempt / "rank-1.log").touch()
    lost = {"rank": 0, "kind": "node", "message": "node 0 (elsewhere, rank 0) is gone: nothing for 30 s; last step 41"}
    (attempt / "first-failure.json").write_text(json.dumps({**lost, "exit_code": 75, "step": 41}))
    explanation = explain_run(str(distant))
    assert (explanation.state, explanation.step) == ("failed", 41)
    assert f"FAILED: {lost['message']}" in explanation.text and "if it still runs" in explanation.text


def test_a_failure_on_another_machine_may_be_followed_by_a_restart(distant: Path) -> None:
    failure = {"rank": 1, "kind": "signal", "message": "SIGKILL (killed from outside)", "step": 41}
    (distant / "logs" / "attempt-1" / "first-failure.json").write_text(json.dumps(failure))
    assert explain_run(str(distant)).state == "restarting"
    assert "and the command on elsewhere restarts them, or has ended" in explain_run(str(distant)).text
    silence(distant, seconds=240)
    assert explain_run(str(distant)).state == "failed"


def test_there_must_be_a_run(shop: Shop) -> None:
    ended = shop.run("why")
    assert ended.code == 2 and "there is no run here yet" in ended.err


def test_a_second_ctrl_c_is_known(shop: Shop, hanging: "subprocess.Popen[str]") -> None:
    wait_until(shop, "run", "hanging")
    for _ in range(2):
        hanging.send_signal(signal.SIGINT)
        time.sleep(0.5)
    _, err = hanging.communicate(timeout=20)
    assert "Stopped at once." in err
    assert "A second stop signal, such as Ctrl-C, ended the ranks at once." in shop.run("why", "run").out


def test_a_full_disk_is_named_if_nothing_could_be_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = _run_folder(tmp_path)
    assert "kill -9, a reboot, the kernel for lack of memory, or a full disk" in explain_run(str(run)).text
    usage = shutil.disk_usage(tmp_path)._replace(free=4096)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    assert "the disk is full now (4.0 KiB are free)" in explain_run(str(run)).text


@pytest.mark.parametrize(("is_done", "state"), [(True, "done"), (False, "unknown")])
def test_a_run_without_logs_is_not_one_that_has_not_started(tmp_path: Path, is_done: bool, state: str) -> None:
    run = _run_folder(tmp_path)
    (run / "logs" / "attempt-1").rmdir()
    assert explain_run(str(run)).state == "not started"
    events = [{"event": "RunStarted", "attempt": 1}, *([{"event": "RunEnded", "status": "done"}] * is_done)]
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    explanation = explain_run(str(run))
    assert explanation.state == state and ("logs is gone or empty" in explanation.text) == (not is_done)


def test_a_run_between_two_attempts_says_why_the_last_one_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run_folder(tmp_path)
    attempt = run / "logs" / "attempt-1"
    failure = {"rank": 1, "kind": "signal", "message": "SIGKILL (killed from outside)", "step": 7}
    (attempt / "first-failure.json").write_text(json.dumps(failure))
    reporter = ActivityReporter()
    reporter.start(attempt / "activity-0")
    reporter.stop()
    monkeypatch.setattr("paceline.commands.why.is_run_folder_locked", lambda _: True)
    monkeypatch.setattr("paceline.commands.why.lock_holder", lambda _: {})
    monkeypatch.setattr("paceline.launch.failures.rank_position.process_state", lambda _: "Z")
    explanation = explain_run(str(run))
    assert explanation.state == "restarting"
    assert "The ranks have ended (rank 1 killed by SIGKILL at step 7), and the command is about to" in explanation.text
