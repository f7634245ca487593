"""The remote tier: a thread of rank 0 that copies checkpoints from the disk to a remote store while the run trains.

The thread has no queue. It compares the store with the checkpoints on disk: the newest one, and the best. So a newer
checkpoint takes the place of one that still waits, and a restarted run uploads what an earlier attempt did not.
"""

import atexit
import threading
import time
from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import BEST, LATEST, list_checkpoints, parse_step, resolve_mark
from paceline.checkpoint.files.remote_errors import RemoteError, remove_secrets
from paceline.checkpoint.files.remote_folder import RemoteFolder
from paceline.console.formatting import format_size, plural
from paceline.errors import CheckpointError
from paceline.events import CheckpointUploaded, Event, Note, UploadFailed

RECORDS = ("plan.json", "skipped.jsonl")
"""Files of the run folder that a resume on another machine needs too."""
_FIRST_DELAY_SECONDS, _MAX_DELAY_SECONDS = 1.0, 60.0
_PROGRESS_SECONDS = 10.0
_POLL_SECONDS = 0.2
_CLOSE_SECONDS = 1.0


class RemoteTier:
    """The uploads of one run. `emit` passes an event to the run's sinks, and may be called from any thread."""

    def __init__(
        self, folder: RemoteFolder, *, run: Path, checkpoints: Path, keep: int, emit: Callable[[Event], None]
    ) -> None:
        self._folder = folder
        self._run = run
        self._checkpoints = checkpoints
        self._keep = keep
        self._emit = emit
        self._condition = threading.Condition()
        self._is_due, self._is_busy, self._is_closed = False, False, False
        self._num_failures, self._reason = 0, ""  # since the last success
        self._failure_time: float | None = None  # of the first of them
        self._delay, self._retry_time = _FIRST_DELAY_SECONDS, 0.0
        self._sent_bytes = 0
        self._damaged: Path | None = None  # the checkpoint that the last warning named
        self._thread = threading.Thread(target=self._work, name="paceline-uploads", daemon=True)
        self.path_in_use: Path | None = None
        """The checkpoint that is being read. It must not be removed."""

    def start(self) -> None:
        """Start the thread. It uploads what is on disk already."""
        self._is_due = bool(list_checkpoints(self._checkpoints))
        self._thread.start()
        atexit.register(self.close)

    def on_commit(self) -> None:
        """Notice that a checkpoint was committed or amended on disk. This returns at once."""
        with self._condition:
            self._is_due = True
            self._condition.notify_all()

    def finish(self, *, timeout_seconds: float, is_interrupted: Callable[[], bool]) -> bool:
        """Wait until the newest checkpoint is uploaded; return whether it is.

        The wait ends early if `is_interrupted()`, or if uploads have failed for `timeout_seconds` in a row.
        """
        next_line_time = time.monotonic() + _PROGRESS_SECONDS
        with self._condition:
            now = time.monotonic()
            self._delay, self._retry_time = _FIRST_DELAY_SECONDS, 0.0
            self._failure_time = None if self._failure_time is None else now
            self._condition.notify_all()
            while (self._is_due or self._is_busy) and not is_interrupted():
                self._condition.wait(_POLL_SECONDS)
                now = time.monotonic()
                if self._failure_time is not None and now - self._failure_time > timeout_seconds:
                    break
                if now > next_line_time:
                    next_line_time = now + _PROGRESS_SECONDS
                    self._emit(Note(text=self._progress_text(timeout_seconds)))
            is_uploaded = not (self._is_due or self._is_busy)
        newest = self._newest()
        if not is_uploaded and newest is not None:
            reason = self._reason or "the upload was not waited for."
            self._emit(UploadFailed(step=parse_step(newest), url=self._url(newest), reason=reason, is_final=True))
        return is_uploaded

    def close(self) -> None:
        """End the thread, also in the middle of a file. Only a request that hangs is abandoned with the process.

        If the interpreter ends while a thread is in obstore, the process may be aborted.
        """
        atexit.unregister(self.close)
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    def _work(self) -> None:
        while self._wait_until_due():
            try:
                self._synchronize()
            except Exception as error:  # whatever it is, it must not end the run
                if not self._is_closed:
                    self._on_failure(error)
            else:
                self._on_success()
            with self._condition:
                self.path_in_use = None
                self._is_busy = False
                self._condition.notify_all()

    def _wait_until_due(self) -> bool:
        """Wait for work and for the end of the pause after a failure. Return False if the run has ended."""
        with self._condition:
            while not self._is_closed:
                delay = self._retry_time - time.monotonic()
                if self._is_due and delay <= 0:
                    self._is_due, self._is_busy = False, True
                    return True
                self._condition.wait(delay if self._is_due else None)
            return False

    def _synchronize(self) -> None:
        """Bring the newest checkpoint, the best one and the records of the run to the store, and remove old ones."""
        newest, best = self._newest(), resolve_mark(self._checkpoints, BEST)
        for name in RECORDS:
            self._copy_record(name)
        if newest is not None:
            self._upload(newest, LATEST)
        if best is not None:
            self._upload_best(best)
        try:
            self._folder.prune(keep=self._keep)
        except RemoteError as error:
            self._emit(Note(text=f"old remote checkpoints are not removed: {error.what}", level="warning"))

    def _copy_record(self, name: str) -> None:
        path = self._run / name
        if path.is_file() and (content := path.read_bytes()) != self._folder.store.read(name):
            self._folder.store.write(name, content)

    def _upload(self, path: Path, kind: str) -> None:
        """Upload a checkpoint, and then let the mark `kind` name it."""
        self.path_in_use, self._sent_bytes = path, 0
        start_time = time.monotonic()
        num_bytes = self._folder.upload(path, on_bytes=self._count)
        self._folder.mark(path.name, kind=kind)
        if num_bytes:
            seconds = time.monotonic() - start_time
            self._emit(
                CheckpointUploaded(step=parse_step(path), url=self._url(path), seconds=seconds, num_bytes=num_bytes)
            )

    def _upload_best(self, path: Path) -> None:
        """Upload the best checkpoint. If it is damaged, say so once: to try again would not help."""
        try:
            self._upload(path, BEST)
        except CheckpointError as error:
            if path.exists() and path != self._damaged:
                text = f"the best checkpoint, {path.name}, is not uploaded: {error.what}"
                self._emit(Note(text=text, level="warning"))
            self._damaged = path

    def _count(self, num_bytes: int) -> None:
        if self._is_closed:
            raise InterruptedError("the run has ended")
        self._sent_bytes += num_bytes

    def _on_success(self) -> None:
        if self._num_failures:
            text = f"{self._folder.store.url} can be written again, after {plural(self._num_failures, 'failed upload')}"
            self._emit(Note(text=text))
        self._num_failures, self._failure_time, self._reason = 0, None, ""
        self._delay, self._retry_time = _FIRST_DELAY_SECONDS, 0.0

    def _on_failure(self, error: Exception) -> None:
        """Report the first failure in a row, and try again after a pause: 1 s, then twice as long each time."""
        path = self.path_in_use or self._newest()
        if path is None or not path.exists():  # somebody removed it; the next one is uploaded
            return
        is_known = isinstance(error, CheckpointError | RemoteError)
        self._reason = str(error) if is_known else remove_secrets(f"{type(error).__name__}: {error}")
        self._num_failures += 1
        if self._num_failures == 1:
            self._failure_time = time.monotonic()
            self._emit(UploadFailed(step=parse_step(path), url=self._url(path), reason=self._reason))
        with self._condition:
            self._is_due = True
            self._retry_time = time.monotonic() + self._delay
            self._delay = min(_MAX_DELAY_SECONDS, 2 * self._delay)

    def _newest(self) -> Path | None:
        return next(reversed(list_checkpoints(self._checkpoints)), None)

    def _url(self, path: Path) -> str:
        return self._folder.step_url(path.name)

    def _progress_text(self, timeout_seconds: float) -> str:
        state = f"{format_size(self._sent_bytes)} sent"
        if self._failure_time is not None:
            remaining = max(0.0, timeout_seconds - (time.monotonic() - self._failure_time))
            state = f"{plural(self._num_failures, 'failed upload')}, gives up in {remaining:.0f} s"
        return f"waiting for the upload to {self._folder.store.url}: {state}; Ctrl-C ends the wait"
