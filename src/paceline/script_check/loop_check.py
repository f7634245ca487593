"""`pl.check`: judge the training loop of this process, in a notebook or in a script, without a line in a shell."""

import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
from typing_extensions import override

from paceline.errors import ExitCode, UsageError
from paceline.script_check.check_command import describe_verdict
from paceline.script_check.judge.script_finding import ScriptFinding
from paceline.script_check.judge.script_run import ScriptRun, read_script_run
from paceline.script_check.judge.verdict import Verdict, judge
from paceline.script_check.recorded_script import refuse_options
from paceline.script_check.recorder.script_recorder import ScriptRecorder, rank_and_world_size
from paceline.script_check.recording import ScriptRecording, recording_file, write_origin

_POLL_SECONDS = 0.02
_COMMAND = ("pl.check",)
_counts: dict[int, int] = {}  # of the checks of this process, which all ranks count alike


class LoopCheck:
    """A check of all optimizer steps within a `with` block. It has the verdict when the block is left.

    `findings` are those of `paceline check`, and the text of the object is what this command prints.
    """

    def __init__(self, *, steps: int, every: int, out: Path | None, wait: float) -> None:
        self._steps = steps
        self._every = every
        self._out = out
        self._wait = wait
        self._folder = Path()
        self._rank, self._world_size = 0, 1
        self._recorder: ScriptRecorder | None = None
        self._wrappers: list[str] = []
        self.verdict = _not_judged("the block has not been left yet")

    @property
    def findings(self) -> list[ScriptFinding]:
        """The findings, with the notes at the end."""
        return self.verdict.findings

    @override
    def __str__(self) -> str:
        return describe_verdict(self.verdict, self._wrappers)

    def __enter__(self) -> Self:
        if self._recorder is not None:
            raise UsageError("this check was used before.", hint="with pl.check() as report")
        self._rank, self._world_size = rank_and_world_size(os.environ)
        self._folder = self._make_folder()
        self._recorder = ScriptRecorder(self._folder, last_step=self._steps, every=self._every, is_whole_process=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._recorder is not None
        self._recorder.close()
        if kind is not None:
            self.verdict = _not_judged(f"the block was left by {kind.__name__}")
        else:
            self._meet("closed")
            self._judge()
            self._meet("read")
        if self._out is None and self._rank == 0:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _make_folder(self) -> Path:
        """Return the folder of the recording: the same one on all ranks, and empty of this rank's files."""
        if self._out is None and self._world_size == 1:
            return Path(tempfile.mkdtemp(prefix="paceline-check-"))
        folder = self._out or _shared_folder()
        folder.mkdir(parents=True, exist_ok=True)
        own = [recording_file(folder, self._rank), *(folder / f"{word}-{self._rank}" for word in ("closed", "read"))]
        if self._out is not None and own[0].exists():
            raise UsageError(f"out={str(self._out)!r} has a recording already.", hint="out= with a new folder")
        for file in own:
            file.unlink(missing_ok=True)
        if self._rank == 0:
            write_origin(folder, ScriptRecording(command=_COMMAND, steps=self._steps, every=self._every))
        return folder

    def _meet(self, word: str) -> None:
        """Wait until all ranks have come here, by files alone: a check calls no collective."""
        if self._world_size == 1:
            return
        (self._folder / f"{word}-{self._rank}").touch()
        until = time.monotonic() + self._wait
        while len(list(self._folder.glob(f"{word}-*"))) < self._world_size and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _judge(self) -> None:
        run = read_script_run(self._folder)
        reason = _missing(run, self._world_size)
        if not run.steps:
            fault = next((rank.fault for rank in run.ranks if rank.fault), "")
            self.verdict = _not_judged(fault or reason or "no optimizer made a step within the block")
            return
        self._wrappers = sorted({name for step in run.steps for rank in step.ranks for name in rank.wrappers})
        verdict = judge(run)
        if reason:
            code = ExitCode.NOT_JUDGED if verdict.exit_code == ExitCode.DONE else verdict.exit_code
            verdict = replace(verdict, exit_code=int(code), reason=reason)
        self.verdict = verdict


def check_loop(*, steps: int = 8, every: int = 1, out: str | Path | None = None, wait: float = 60.0) -> LoopCheck:
    """Check the training loop in a `with` block as `paceline check` checks a script.

    The first `steps` optimizer steps of the block are recorded; 0: all of them. The training continues unchanged. When
    the block is left, each rank waits up to `wait` seconds for the others, and has the verdict. `out` is a folder for
    the recording, which ranks on several machines must share; by default, it is a temporary one.

    Raises:
        UsageError: an option can't be used.
    """
    refuse_options(steps=steps, wait=wait, out=None, every=every)
    return LoopCheck(steps=steps, every=every, out=None if out is None else Path(out), wait=wait)


check = check_loop  # as `pl.check`


def _shared_folder() -> Path:
    """Return a temporary folder that all ranks of this machine know: they have one parent, and count their checks."""
    parent = psutil.Process(os.getppid())
    number = _counts[parent.pid] = _counts.get(parent.pid, 0) + 1
    words = (parent.pid, int(parent.create_time()), os.environ.get("MASTER_PORT", ""), number)
    return Path(tempfile.gettempdir()) / "-".join(["paceline-check", *map(str, words)])


def _missing(run: ScriptRun, world_size: int) -> str:
    if run.world_size >= world_size or world_size == 1:
        return ""
    return (
        f"{run.world_size} of {world_size} ranks have a recording: on several machines, out= is a folder of all ranks"
    )


def _not_judged(reason: str) -> Verdict:
    return Verdict(
        exit_code=int(ExitCode.NOT_JUDGED),
        ranks=1,
        steps=0,
        findings=[],
        sound=[],
        not_exercised=[],
        reason=reason,
    )
