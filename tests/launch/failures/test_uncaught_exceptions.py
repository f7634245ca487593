"""Of an uncaught exception in a world one rank prints all, the others at most a line."""

import gc
import io
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import paceline as pl
import paceline.launch.failures.single_reporter as claim
import paceline.launch.failures.uncaught_exceptions as uncaught_module
from paceline.commands import python_functions as functions
from paceline.commands.common.execution import CommandOutcome
from paceline.console.output import write_safely
from paceline.errors import PeerError, UsageError
from paceline.launch.agent import worker_process as child
from paceline.launch.failures.single_reporter import ReportScope, claim_report
from paceline.launch.failures.uncaught_exceptions import (
    ERROR_FILE,
    UncaughtHook,
    install_uncaught_hook,
    remove_hook_at_end,
    report_failure,
)

ALL, LINE, NOTHING = (
    ReportScope(prints_all=True),
    ReportScope(prints_line=True, is_already_reported=True),
    ReportScope(is_already_reported=True),
)


def world(rank: int, *, size: int = 4, restart: int = 0, kind: str = "torchrun") -> dict[str, str]:
    marks = {"torchrun": {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": str(restart)}}.get(kind, {})
    numbers = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    return {**marks, **{name: str(number) for name, number in numbers.items()}}


class Process:
    """Says who this process is, to try ranks one after another in one."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def be(self, rank: int, **more: Any) -> dict[str, str]:
        found = world(rank, **more)
        self._patch.setattr(claim.os, "getpid", lambda: 1000 + rank + 100 * int(more.get("restart", 0)))
        for name in ("TORCHELASTIC_RUN_ID", *found):
            self._patch.delenv(name, raising=False)
        for name, value in found.items():
            self._patch.setenv(name, value)
        return found


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    monkeypatch.setattr(claim, "user_folder", lambda: tmp_path)
    return Process(monkeypatch)


@pytest.fixture(autouse=True)
def own_hook() -> Iterator[None]:
    """Each test finds Python's hook; one before it may have let an error of ours out, whose hook stays."""
    before, sys.excepthook = sys.excepthook, sys.__excepthook__
    yield
    sys.excepthook = before


def test_the_first_rank_tells_all_and_the_others_what_they_alone_know(process: Process) -> None:
    said = [claim_report("E: no", environ=process.be(rank)) for rank in (2, 0, 1)]
    assert said == [ALL, NOTHING, NOTHING]
    assert claim_report("E: no", environ=process.be(2)) == ALL  # the same process asks twice
    assert claim_report("E: something else", environ=process.be(3)) == LINE


def test_of_the_ranks_that_only_lost_another_one_speaks(process: Process) -> None:
    claim_report("E: no", environ=process.be(2))
    assert [claim_report("lost", environ=process.be(rank), is_echo=True) for rank in (0, 1, 3)] == [
        LINE,
        NOTHING,
        NOTHING,
    ]


def test_where_the_rank_that_failed_is_mute_an_echo_tells_all(process: Process) -> None:
    said = [claim_report("lost", environ=process.be(rank), is_echo=True) for rank in (3, 0)]
    assert said == [ReportScope(prints_all=True, prints_line=True), ReportScope()]


def test_a_restart_a_wrapper_and_a_world_without_a_launcher_tell_their_own(
    process: Process, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert claim_report("E: no", environ=process.be(0)) == ALL
    assert claim_report("E: no", environ=process.be(1, restart=1)) == ALL  # torchrun has started all ranks again
    environ = process.be(0)
    monkeypatch.setattr(claim.os, "getpid", lambda: 77)  # a wrapper of this rank has started one more program
    assert claim_report("E: no", environ=environ) == ALL
    assert [claim_report("E: no", environ=process.be(rank, kind="environment")) for rank in (0, 1)] == [ALL, ALL]
    assert claim_report("E: no", environ={}) == ALL
    (tmp_path / "told-1-0-0-cause").write_text("{}")  # of a launcher that is gone
    claim_report("E: no", environ=process.be(2, restart=2))
    assert not (tmp_path / "told-1-0-0-cause").exists()


def uncaught(error: Exception, hook: UncaughtHook) -> str:
    """What is on the standard error after this error."""
    said = io.StringIO()
    with redirect_stderr(said):
        try:
            raise error
        except Exception as raised:
            hook(type(raised), raised, raised.__traceback__)
    return said.getvalue()


def test_a_hook_of_the_users_own_hears_every_rank_and_prints_on_one(process: Process, tmp_path: Path) -> None:
    heard = []

    def theirs(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        heard.append((os.environ["RANK"], kind, trace is not None))
        print("BOX", error, file=sys.stderr)

    hook = UncaughtHook(theirs)
    process.be(1)
    os.environ[ERROR_FILE] = str(tmp_path / "error.json")
    try:
        assert uncaught(ValueError("no loss today"), hook) == "BOX no loss today\n"
        told = json.loads((tmp_path / "error.json").read_text())["message"]
        process.be(0)
        late = uncaught(PeerError("rank 0 could not continue"), hook)
        echo = json.loads((tmp_path / "error.json").read_text())["message"]
    finally:
        del os.environ[ERROR_FILE]
    assert late == "rank 0 could not continue\n"
    assert heard == [("1", ValueError, True), ("0", PeerError, True)]
    assert told["message"].startswith("FAILED. rank 1, ") and told["message"].endswith("ValueError: no loss today")
    assert told["extraInfo"]["py_callstack"] == told["message"] and "Traceback" in told["extraInfo"]["traceback"]
    assert int(echo["extraInfo"]["timestamp"]) > int(told["extraInfo"]["timestamp"])


def test_an_error_of_ours_is_a_sentence_and_one_of_the_users_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    hook = UncaughtHook(sys.__excepthook__)
    said = uncaught(UsageError("no such layout.", hint="--layout ddp"), hook)
    assert said.splitlines()[0] == "error: no such layout." and said.splitlines()[-1] == "  to do: --layout ddp"
    assert "Traceback" not in said and f"  where: {__file__}:" in said
    assert UncaughtHook(sys.__excepthook__) is not None and "Traceback" not in uncaught(PeerError("gone"), hook)


def test_it_is_there_once_and_leaves_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    before = sys.excepthook
    first = install_uncaught_hook()
    assert first is not None and install_uncaught_hook() is None and sys.excepthook is first
    heard: list[object] = []
    sys.excepthook = lambda *what: (heard.append(what), first(*what))  # as torch's, which a process group brings
    first.remove()
    assert sys.excepthook is not before and not first.is_active
    monkeypatch.setattr(first, "_previous_hook", lambda *what: heard.append("passed on"))
    sys.excepthook(ValueError, ValueError("x"), None)
    assert heard[-1] == "passed on"
    sys.excepthook = before
    second = install_uncaught_hook()
    assert second is not None
    second.remove()
    assert sys.excepthook is before


def frames_of_ours(hook: UncaughtHook) -> int:
    """How many of our lines are in the traceback that a hook gets of a user's own error, raised through ours."""

    def mine() -> None:
        raise ValueError("mine")

    left: ValueError | None = None
    try:
        write_safely(mine, io.StringIO())
    except ValueError as error:
        left = error
        with redirect_stderr(io.StringIO()):
            hook(ValueError, error, error.__traceback__)
    assert left is not None
    names = [frame.name for frame in traceback.extract_tb(left.__traceback__)]
    assert names[-1] == "mine"
    return names.count("write_safely")


def test_a_hook_of_the_users_own_gets_the_whole_traceback(process: Process) -> None:
    process.be(0)

    def torchs(*what: Any) -> None:
        sys.__excepthook__(*what)

    assert frames_of_ours(UncaughtHook(lambda *_: None)) == 1
    assert frames_of_ours(UncaughtHook(sys.__excepthook__)) == 0
    torchs.__module__ = "torch.distributed.distributed_c10d"
    assert frames_of_ours(UncaughtHook(torchs)) == 0


def test_only_the_error_that_left_is_told_once_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the script catches it shows later: until then it is told, and no other error is."""
    passed: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda *what: passed.append(what[1]))
    hook = install_uncaught_hook()
    assert hook is not None
    left, other, of_it = ValueError("left"), ValueError("other"), ValueError("of it")
    with pytest.raises(ValueError, match="left"), remove_hook_at_end(hook):
        raise left
    of_it.__context__ = left
    told: list[BaseException] = []

    def note(error: BaseException) -> Any:
        told.append(error)
        return report_failure(error)

    monkeypatch.setattr(uncaught_module, "report_failure", note)
    for error in (left, other, of_it):
        sys.excepthook(type(error), error, None)
    assert told == [left, of_it] and passed == [left, other, of_it]
    assert install_uncaught_hook() is hook and hook.is_active, "it stands there once"
    with remove_hook_at_end(hook):
        pass
    assert sys.excepthook is not hook


def test_the_hook_of_a_placed_model_goes_with_the_model() -> None:
    before = sys.excepthook
    placed = pl.place(lambda: torch.nn.Linear(2, 1))
    assert isinstance(sys.excepthook, UncaughtHook) and placed.world.world_size == 1
    del placed
    gc.collect()
    assert sys.excepthook is before
    with pytest.raises(ZeroDivisionError) as failed:
        pl.place(lambda: torch.nn.Linear(1 // 0, 1))
    assert not sys.excepthook.is_active  # type: ignore[attr-defined]
    assert "_paceline_left" in vars(failed.value)


def test_what_ends_a_rank_of_another_launcher_is_raised_as_it_is(process: Process, tmp_path: Path) -> None:
    process.be(0)
    mine = ValueError("my own mistake")
    with pytest.raises(ValueError, match="my own mistake") as caught:
        functions._build_result(
            CommandOutcome(exit_code=1, run=tmp_path, error=mine, json_fields={"go_on": "paceline train job.py"})
        )
    assert caught.value is mine and mine.__notes__ == ["paceline train job.py"]


def test_who_tells_it_is_the_root_cause(process: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun takes the smallest second, and the first rank where several have the same."""
    monkeypatch.setattr(uncaught_module.time, "time", lambda: 1000.9)
    seconds = {}
    for rank in (1, 0):
        process.be(rank)
        monkeypatch.setenv(ERROR_FILE, str(tmp_path / f"error-{rank}.json"))
        report_failure(ValueError("the same on both"))
        seconds[rank] = json.loads((tmp_path / f"error-{rank}.json").read_text())["message"]["extraInfo"]["timestamp"]
    assert seconds == {1: "1000", 0: "1002"}


def test_a_file_that_is_none_of_ours_is_passed_over(process: Process, tmp_path: Path) -> None:
    for name in ("told-x", "told-1-0", "told-"):
        (tmp_path / name).touch()
    assert claim_report("E: no", environ=process.be(0)) == ALL
    assert all((tmp_path / name).exists() for name in ("told-x", "told-1-0", "told-"))


def test_what_native_code_said_stays_where_it_aborts(tmp_path: Path) -> None:
    said = "import os\nfrom paceline.console.output import capture_native_stderr\nwith capture_native_stderr():\n    os.write(2, b'lost the store'); END"
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    environ.pop("PACELINE_ATTEMPT_FOLDER", None)
    command = [sys.executable, "-c", said.replace("END", "os.abort()")]
    assert subprocess.run(command, env=environ, check=False, capture_output=True).returncode == -6
    assert [file.read_bytes() for file in tmp_path.glob("paceline-join-*.log")] == [b"lost the store"]
    for file in tmp_path.iterdir():
        os.utime(file, (0, 0))  # the next command removes it after a day
    ended = subprocess.run([*command[:2], said.replace("END", "pass")], env=environ, check=True, capture_output=True)
    assert ended.stderr == b"lost the store" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("verb", "listens"), [("train", True), ("compare", True), ("plan", False), ("verify", False)])
def test_a_signal_waits_only_where_a_loop_asks_for_it(
    verb: str, listens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []
    monkeypatch.setattr(child, "stop_flag", SimpleNamespace(install=lambda: heard.append(verb)))
    monkeypatch.setattr(child, "_run_entry", lambda *_: 0)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert child.run_joined("x", {"verb": verb}, threads=torch.get_num_threads()).code == 0
    assert heard == [verb] * listens


def test_an_interrupt_goes_to_the_hook_that_was_there() -> None:
    heard: list[object] = []
    UncaughtHook(lambda *what: heard.append(what[0]))(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert heard == [KeyboardInterrupt]
