"""The live output of a run in the terminal that started it: one rank's log lines, and a progress bar."""

import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from paceline.console.escaping import encodable_job_output
from paceline.console.formatting import format_metric
from paceline.console.output import take_dropped_note, write_safely
from paceline.events import Note
from paceline.launch.agent.shared_status import read_heartbeat
from paceline.launch.failures.failure_record import TRACEBACK_MARKER
from paceline.launch.failures.stack_dumps import CRASH_MARKER, is_crash_line
from paceline.reporting.sinks.jsonl import JsonlSink
from paceline.run_folder.run_folder import RunFolder

_LIBRARY_DIAGNOSTICS = re.compile(
    r"""(\[rank\d+\]:\s?)?\[?[WI]\d{4,8}\ [\d:.]+\ [^]]*(torch/|c10d|\.cpp:|ProcessGroup)[^]]*\]  # from torch's sources
    |\[Gloo\]\ Rank\ \d+\ is\ connected
    |terminate\ called\ after\ throwing\ an\ instance\ of\ 'gloo::|\ +what\(\):\ +\[enforce\ fail\ at\ \S*gloo
    |NCCL\ version\ |\S+:\d+:\d+\ \[\d+\]\ NCCL\ INFO\ """,
    re.VERBOSE,
)
"""Diagnostics that libraries print for their developers. The terminal omits them; they are in the rank's log.

The pattern matches no errors, except the last message of gloo, which the failure screen replaces by a sentence."""


class LogTail:
    """A follower of one rank's log and of its heartbeats."""

    def __init__(self, folder: Path, *, rank: int = 0, out: TextIO | None = None) -> None:
        self._log = folder / f"rank-{rank}.log"
        self._pulse = folder / f"pulse-{rank}"  # the file of the heartbeats
        self._file: BinaryIO | None = None  # it stays open, so that lines are shown although the folder was moved
        self._partial_line = b""
        self._is_silenced = False  # True after a traceback has begun, which the failure screen shows instead
        self._is_in_crash = False
        self._note = ""
        self._out = out or sys.stdout
        # With `force_terminal`, FORCE_COLOR can't make rich treat a file as a terminal.
        self._console = Console(file=self._out, force_terminal=self._out.isatty())
        self._bar = self._make_bar() if self._console.is_terminal else None
        self._task = self._bar.add_task("", total=None, loss="") if self._bar else None

    def __call__(self) -> None:
        """Print the new lines. If the output can't be written (`| head -1`, a closed terminal), the run continues."""
        write_safely(self._print_new, self._out)
        self._record_dropped_output()

    def _record_dropped_output(self) -> None:
        """Append a note on lost output to the run's events, as soon as the file of events exists."""
        self._note = take_dropped_note() or self._note
        run = RunFolder(self._log.parents[2])
        if self._note and run.events.exists():
            with suppress(OSError):
                sink = JsonlSink(run)
                sink.handle(Note(text=self._note, level="warning"))
                sink.close()
            self._note = ""

    def _print_new(self) -> None:
        for line in self._new_lines():
            if self._bar is not None:
                self._bar.console.print(
                    encodable_job_output(line, self._out), markup=False, highlight=False, soft_wrap=True
                )
            else:
                self._out.write(encodable_job_output(line, self._out) + "\n")
        self._out.flush()
        self._update_bar()

    def close(self) -> None:
        """Print the rest of the log, and restore the terminal."""
        self()
        if self._partial_line:
            last_line = encodable_job_output(self._partial_line.decode(errors="replace"), self._out)
            write_safely(lambda: print(last_line, file=self._out, flush=True), self._out)
        if self._bar is not None:
            self._bar.stop()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _new_lines(self) -> list[str]:
        """Return the new complete lines of the log, without diagnostics, a traceback and all that follows it."""
        try:
            self._file = self._file or self._log.open("rb")
            data = self._file.read()
        except OSError:
            return []
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        texts = [text for line in lines if not _LIBRARY_DIAGNOSTICS.match(text := line.decode(errors="replace"))]
        if TRACEBACK_MARKER in texts or self._is_silenced:
            texts = [] if self._is_silenced else _before_traceback(texts)
            self._is_silenced, self._partial_line = True, b""
        return [text for text in texts if not self._is_part_of_crash(text)]

    def _is_part_of_crash(self, text: str) -> bool:
        """Return whether a line belongs to the stack of a crash in native code, of the rank or of its children."""
        self._is_in_crash = text.startswith(CRASH_MARKER) or (self._is_in_crash and is_crash_line(text))
        return self._is_in_crash

    def _update_bar(self) -> None:
        beat = read_heartbeat(self._pulse)
        if self._bar is None or self._task is None or beat is None or not beat.step:
            return
        self._bar.start()
        loss = f"loss {format_metric(beat.loss)}"
        self._bar.update(self._task, completed=beat.step, total=beat.total or None, loss=loss)

    def _make_bar(self) -> Progress:
        return Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeRemainingColumn(),
            console=self._console,
            transient=True,
        )


def _before_traceback(lines: list[str]) -> list[str]:
    """Return the lines before the marker of a traceback, without the end of a line that `print_traceback` writes."""
    before = lines[: lines.index(TRACEBACK_MARKER)]
    return before[:-1] if before and not before[-1] else before
