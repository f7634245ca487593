"""The lock of a run folder: one run at a time. The kernel releases the lock when its last holder ends.

The launcher locks the folder, and its workers inherit the lock. If the launcher is killed, the folder stays locked
until its last worker has ended, so that no later run writes at the same time.
"""

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import SaveError, UsageError
from paceline.filesystem.atomic_files import open_no_follow, parse_json, report_write_errors

LOCK = ".lock"
_FORBIDDEN_LINKS = (LOCK, "events.jsonl", "metrics.jsonl", "logs", "tb", "wandb")
_USER_LINKS = ("checkpoints", "consolidated")  # refused only if another user created the link
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_WAIT_SECONDS = 30.0
_POLL_SECONDS = 0.05
_NO_LOCKS = {  # errors of a disk without locks
    errno.ENOLCK,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.ENOSYS,
    errno.EINVAL,
}


@dataclass
class RunLock:
    """A lock that is held. `handle` is the open lock file, which workers inherit and keep open."""

    handle: int

    def close(self) -> None:
        """Close the lock. The kernel releases it when every worker that inherited it has ended too."""
        handle, self.handle = self.handle, -1
        if handle >= 0:
            with suppress(OSError):
                os.ftruncate(handle, 0)
            os.close(handle)

    def close_in_forks(self) -> None:
        """Make every child that this process forks close the lock.

        A rank calls this, because its children, such as data workers, do not write into the run folder and may outlive
        the run.
        """
        os.register_at_fork(after_in_child=self._close_in_child)

    def _close_in_child(self) -> None:
        handle, self.handle = self.handle, -1
        if handle >= 0:
            with suppress(OSError):
                os.close(handle)


def lock_run_folder(folder: Path, *, on_wait: Callable[[str], None]) -> RunLock:
    """Lock the run folder for this run. If the holder has ended and its workers are still exiting, wait for them.

    `on_wait` is called once with the reason. On a disk without locks, the folder is in use if the holder that the lock
    file names is alive; a holder on another machine is assumed to be.

    Raises:
        UsageError: another run writes there.
    """
    handle = _open_lock_file(folder)
    deadline, has_reported = time.monotonic() + _WAIT_SECONDS, False
    try:
        while not _try_lock(handle):
            holder = _read_holder(handle)
            if is_holder_alive(holder) or time.monotonic() > deadline:
                raise _in_use_error(folder, holder)
            if not has_reported:
                on_wait(f"waiting for processes of an earlier run in {folder} to end")
            has_reported = True
            time.sleep(_POLL_SECONDS)
        with report_write_errors(folder):
            _write_holder(handle)
    except BaseException:
        os.close(handle)
        raise
    return RunLock(handle)


def _open_lock_file(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        refuse_links(folder)
        return open_no_follow(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UsageError(
            f"{folder / LOCK} can't be written: {error.strerror}.", hint="--run-dir on a writable disk"
        ) from None


def is_run_folder_locked(folder: Path) -> bool:
    """Return whether a run has locked the folder.

    A lock that another machine holds may be invisible here, so a holder on another machine also counts if the lock file
    names it. On a disk without locks, a holder on this machine counts too while it is alive.
    """
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        holder = _read_holder(handle)
        return bool(holder) and not is_on_this_machine(holder) and is_holder_alive(holder)
    except OSError as error:
        return isinstance(error, BlockingIOError) or is_holder_alive(_read_holder(handle))
    finally:
        os.close(handle)


def lock_holder(folder: Path) -> dict[str, Any]:
    """Return the `host` and the `pid` of the holder of a locked folder; empty if the lock file does not say."""
    try:
        handle = os.open(folder / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return {}
    try:
        return _read_holder(handle)
    finally:
        os.close(handle)


def refuse_links(folder: Path) -> None:
    """Raise an error for links in a run folder, through which a run would write to another place.

    The folders of checkpoints and of the final model may be the user's own links, to a larger disk.

    Raises:
        UsageError: there is such a link; the message names it.
    """
    for name in (*_FORBIDDEN_LINKS, *_USER_LINKS):
        path = folder / name
        if path.is_symlink() and (name in _FORBIDDEN_LINKS or path.lstat().st_uid != os.geteuid()):
            owner_note = "" if name in _FORBIDDEN_LINKS else " that another user created"
            raise UsageError(
                f"{path} is a link to {path.readlink()}: the run would write to that place.",
                cause=f"links{owner_note} in a run folder are not followed",
                hint=f"rm {path}, or another --run-dir",
            )


class FolderIdentity:
    """The identity of a run folder on the disk, so that a run does not write into another folder with the same name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._identity = self._identify()

    def check(self) -> None:
        """Check that the folder of this run still exists.

        Raises:
            SaveError: the folder was moved or removed, or another folder has its name.
        """
        if self._identify() != self._identity:
            raise SaveError(
                f"the run folder {self._folder} was moved or removed.",
                where=str(self._folder),
                cause="somebody moved, removed or recreated it while this run wrote there",
                hint="move it back if it is elsewhere, then the same command; nothing was written into the new one",
            )

    def _identify(self) -> tuple[int, int] | None:
        """Return the identity of the lock file. This process holds it open, so that its inode is not reused."""
        return _device_and_inode(self._folder / LOCK) or _device_and_inode(self._folder)


def _device_and_inode(path: Path) -> tuple[int, int] | None:
    try:
        stats = path.stat()
    except OSError:
        return None
    return stats.st_dev, stats.st_ino


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return not is_holder_alive(_read_holder(handle))
    return True


def _in_use_error(folder: Path, holder: dict[str, Any]) -> UsageError:
    pid, host = holder.get("pid", "?"), holder.get("host", "?")
    cause, hint = (
        "the same command, started twice",
        f"another --run-dir, or end that process first: kill {pid} on {host}",
    )
    if not is_holder_alive(holder):
        cause, hint = "workers of a run are still alive although its launcher has ended", f"fuser -v {folder / LOCK}"
        pids = _pids_with_open_file(folder / LOCK)
        if pids:
            cause += f": {', '.join(f'process {pid} ({_command_line(pid)})' for pid in pids[:4])}"
            hint = f"kill {' '.join(map(str, pids))}, unless that run should continue"
    return UsageError(
        f"{folder} is in use: process {pid} on {host} has been writing there since {holder.get('since', '?')}.",
        cause=cause,
        hint=hint,
    )


def _pids_with_open_file(path: Path) -> list[int]:
    """Return the other processes of this machine that have the file open, as far as this user may see them."""
    pids = []
    with suppress(OSError):
        lock_stat = os.stat(path)  # noqa: PTH116  compared with the stat of an open handle's link
        for folder in Path("/proc").glob("[0-9]*/fd"):
            with suppress(OSError):
                if int(folder.parent.name) != os.getpid() and any(
                    _is_same_file(lock_stat, link) for link in folder.iterdir()
                ):
                    pids.append(int(folder.parent.name))
    return sorted(pids)


def _is_same_file(lock_stat: os.stat_result, link: Path) -> bool:
    try:
        return os.path.samestat(lock_stat, link.stat())
    except OSError:
        return False


def _command_line(pid: int) -> str:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return "?"
    return " ".join(arguments).strip()[:80]


def _write_holder(handle: int) -> None:
    """Write this process into the lock file as its holder."""
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(this_process()).encode(), 0)


def this_process() -> dict[str, Any]:
    """Return a record that identifies this process, for `is_holder_alive`."""
    pid = os.getpid()
    return {
        "pid": pid,
        "host": socket.gethostname(),
        "machine": _machine_identity(),
        "born": process_start_time(pid),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def _read_holder(handle: int) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        holder = parse_json(os.pread(handle, 4096, 0))
        return holder if isinstance(holder, dict) else {}
    return {}


def is_holder_alive(holder: dict[str, Any]) -> bool:
    """Return whether the recorded process still exists; assumed True for a process on another machine."""
    if not holder:
        return False
    if not is_on_this_machine(holder):
        return True
    born = process_start_time(_pid_of(holder))
    return born is not None and born == holder.get("born")


def is_on_this_machine(holder: dict[str, Any]) -> bool:
    """Return whether the recorded process ran where this one can see it, under whatever host name.

    The nodes that are played on one machine have host names of their own.
    """
    host, machine = holder.get("host"), holder.get("machine")
    return host in (None, "", socket.gethostname()) or (bool(machine) and machine == _machine_identity())


def _machine_identity() -> str:
    """Return what identifies this start of the machine and its set of process ids; empty if it is not known."""
    with suppress(OSError):
        boot = _BOOT_ID.read_text(encoding="ascii").strip()
        return f"{boot} {_PID_NAMESPACE.readlink()}"
    return ""


def _pid_of(holder: dict[str, Any]) -> int:
    """Return the holder's process id; 0, which no process has, if the record is invalid."""
    pid = holder.get("pid")
    return pid if isinstance(pid, int) else 0


def process_start_time(pid: int) -> str | None:
    """Return a process's start time, or None if it has ended. Process id and start time together are unique."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
