"""The log of a pod, line by line. A stream that breaks is opened again, and no line is printed twice."""

import os
import re
import select
import subprocess
import time
from collections.abc import Callable

_LINE = re.compile(r"(\d{4}-\d\d-\d\dT\S+) ?(.*)", re.DOTALL)
_CHUNK = 65536
_END_SECONDS = 30.0  # for the rest of a log whose container has ended


class PodLog:
    """The log of a container. `print_lines` returns at the latest after the given seconds."""

    def __init__(self, pod: str, container: str, *, starts: int = 0, report: Callable[[str], None]) -> None:
        self.pod = pod
        self.starts = starts
        """How often the container was started again in the pod before this log."""
        self._container = container
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None
        self._rest = b""
        self._last_time, self._num_at_last_time = "", 0
        self._num_to_skip: int | None = None  # of lines at the last time; None if no line was printed before
        self._trouble = ""
        self._is_finished = False

    def open(self) -> None:
        """Begin to read, or continue where the stream broke. May be called often."""
        if self._process is None and not self._is_finished:
            self._process = self._start("--follow")

    def print_lines(self, seconds: float) -> None:
        """Print the lines that come in the next seconds."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._process is None or self._process.stdout is None:
                time.sleep(left)
                return
            if select.select([self._process.stdout], [], [], left)[0] and not self._print_chunk(
                self._process.stdout.fileno()
            ):
                self._report_trouble()
                self.close()

    def finish(self) -> None:
        """Print the rest, after the container has ended. May be called often."""
        if self._is_finished:
            return
        self._is_finished = True
        end = time.monotonic() + _END_SECONDS
        while self._process is not None and time.monotonic() < end:
            self.print_lines(0.1)
        self.close()
        self._process = self._start()
        try:
            text, _ = self._process.communicate(timeout=_END_SECONDS)
        except subprocess.TimeoutExpired:
            text = b""
        for line in text.splitlines():
            self._print_line(line)
        self.close()

    def close(self) -> None:
        """End the stream; half a line is left out."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process, self._rest = None, b""

    def _start(self, *more: str) -> "subprocess.Popen[bytes]":
        since = [f"--since-time={self._last_time}"] if self._last_time else []
        self._num_to_skip = self._num_at_last_time if self._last_time else None
        command = ["kubectl", "logs", *more, "--timestamps", "--container", self._container, *since, self.pod]
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
        )

    def _print_chunk(self, stream: int) -> bool:
        """Print the whole lines that are there; return False at the end of the stream."""
        chunk = os.read(stream, _CHUNK)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._print_line(line)
        return bool(chunk)

    def _print_line(self, line: bytes) -> None:
        """Print a line without its time, unless it was printed before the stream broke."""
        match = _LINE.fullmatch(line.decode(errors="replace"))
        if match is None:
            self._report(line.decode(errors="replace"))
            return
        moment, text = match[1], match[2]
        if self._num_to_skip is not None:
            if moment < self._last_time:
                return
            if moment == self._last_time and self._num_to_skip:
                self._num_to_skip -= 1
                return
            self._num_to_skip = None
        self._num_at_last_time = self._num_at_last_time + 1 if moment == self._last_time else 1
        self._last_time = moment
        self._report(text)

    def _report_trouble(self) -> None:
        """Say once why there is no log."""
        if self._process is None or not self._process.wait() or self._process.stderr is None:
            return
        trouble = self._process.stderr.read().decode(errors="replace").strip()
        if trouble and trouble != self._trouble:
            self._report(f"no log of pod {self.pod} at the moment: {trouble}")
        self._trouble = trouble
