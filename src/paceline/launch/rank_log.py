"""The log of a rank that another launcher started: the rank itself writes its output there.

By default, a copy of what the rank prints goes to the log, and the launcher's console stays as it is. The output of a
rank can also be redirected to the log, including that of native code.
"""

import os
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from paceline.console.output import flush

_STREAMS = ("stdout", "stderr")
_DESCRIPTORS = (1, 2)


class RankLog:
    """The open log of this process. Its output goes there until `close`."""

    def __init__(self, path: Path, *, redirects: bool) -> None:
        """Open the log, and copy the output to it, or redirect the output.

        Raises:
            OSError: the log can't be created.
        """
        self.path = path
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o644)
        self._originals: dict[int, int] = {}
        self._copies: dict[str, CopiedStream] = {}
        if redirects:
            self._redirect()
        else:
            self._copy()

    def _redirect(self) -> None:
        flush()
        for descriptor in _DESCRIPTORS:
            self._originals[descriptor] = os.dup(descriptor)
            os.dup2(self._descriptor, descriptor)

    def _copy(self) -> None:
        for name in _STREAMS:
            self._copies[name] = copy = CopiedStream(getattr(sys, name), self._descriptor)
            setattr(sys, name, cast("TextIO", copy))

    def write_traceback(self, error: BaseException) -> None:
        """Write the full traceback to the log, and not to the console."""
        flush()
        try:
            lines = traceback.format_exception(error)
        except Exception:  # the exception's own `__str__` may fail
            lines = traceback.format_tb(error.__traceback__)
        with suppress(OSError):  # the disk may be full
            os.write(self._descriptor, "".join(lines).encode(errors="backslashreplace"))

    def close(self) -> None:
        """Let the output go only to where it went before."""
        flush()
        for descriptor, original in self._originals.items():
            os.dup2(original, descriptor)
            os.close(original)
        for name, copy in self._copies.items():
            copy.stop()
            if getattr(sys, name) is copy:  # the job has not replaced it since
                setattr(sys, name, copy.original)
        os.close(self._descriptor)


class CopiedStream:
    """A text stream whose text is also written to a file descriptor. In everything else, it is the original stream."""

    def __init__(self, original: TextIO, descriptor: int) -> None:
        self.original = original
        self._descriptor = descriptor

    def write(self, text: str) -> int:
        """Write to the original stream, and to the descriptor. An error of the descriptor ends the copying."""
        count = self.original.write(text)
        if self._descriptor >= 0:
            try:
                os.write(self._descriptor, text.encode(errors="backslashreplace"))
            except OSError:
                self.stop()
        return count

    def writelines(self, lines: Any) -> None:
        """Write each line."""
        for line in lines:
            self.write(line)

    def stop(self) -> None:
        """Write only to the original stream from now on."""
        self._descriptor = -1

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def is_shared_with(parent: int) -> bool:
    """Return whether this process writes to the same place as its parent process, and not to a file of its own."""
    try:
        return all(
            os.path.samestat(os.fstat(descriptor), os.stat(f"/proc/{parent}/fd/{descriptor}"))  # noqa: PTH116
            for descriptor in _DESCRIPTORS
        )
    except OSError:
        return False
