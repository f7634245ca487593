"""The free space that a save needs, and explanations of disk errors: the cause of each, and a hint."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.console.formatting import format_size
from paceline.errors import SaveError
from paceline.filesystem.atomic_files import free_bytes

_SMALL_FILE_BYTES = 16 << 10
_SPARE_BYTES = 16 << 20  # a save needs this much free space beyond its tensors
_CAUSES = {  # cause and hint, by error number
    errno.EROFS: ("the disk is read-only", "--run-dir on a writable disk"),
    errno.EACCES: ("you have no permission to write there", "chmod or chown it, or --run-dir in a writable folder"),
    errno.EPERM: ("you have no permission to write there", "chmod or chown it, or --run-dir in a writable folder"),
    errno.EDQUOT: (
        "your quota on this disk is used up",
        "remove some of your files there, or --run-dir on another disk",
    ),
    errno.EFBIG: ("the file is too large: `ulimit -f`, or a limit of the file system", "ulimit -f unlimited"),
    errno.ENOTDIR: ("a file or a link has the name of a folder that is needed", "move it away"),
    errno.EISDIR: ("a folder of that name already exists", "move it away"),
    errno.EEXIST: ("that name already exists", "move it away"),
    errno.ELOOP: ("it is a symbolic link, which is not followed here", "remove the link"),
    errno.ENOTEMPTY: ("a folder there can't be replaced: another program writes into it", "end that program"),
    errno.EBUSY: ("another disk is mounted there, or a program is using it", "use another path"),
    errno.ENOENT: ("the folder was moved or removed during the run", "do not move the folder of a training run"),
    errno.ENAMETOOLONG: ("its name is too long for this disk", "a shorter --run-dir"),
    errno.EMFILE: ("this process has too many files open: `ulimit -n`", "ulimit -n 4096"),
    errno.ENFILE: ("this machine has too many files open", "end other programs"),
    errno.EIO: ("the disk or its network connection failed", "dmesg, or --run-dir on another disk"),
    errno.ESTALE: (
        "the network disk no longer knows the folder (stale handle)",
        "mount it again, or --run-dir on another disk",
    ),
}


@contextmanager
def convert_to_save_error(description: str, folder: Path) -> Iterator[None]:
    """Convert an `OSError` in the block into a `SaveError`.

    Raises:
        SaveError: the block raised an `OSError`.
    """
    try:
        yield
    except OSError as error:
        cause, hint = explain_disk_error(error, folder)
        raise SaveError(
            f"{description} could not be written: {error.strerror or error}.",
            where=str(folder),
            cause=cause,
            hint=f"{hint}; older checkpoints are unchanged",
        ) from error


def explain_disk_error(error: OSError, folder: Path) -> tuple[str, str]:
    """Return the cause of a failed write into `folder`, and a hint."""
    if error.errno == errno.ENOSPC and _has_no_inodes(folder):
        return "no more files can be created there: all inodes are used (`df -i`)", "remove some files"
    if error.errno == errno.ENOTEMPTY and not os.access(folder, os.W_OK | os.X_OK):
        return _CAUSES[errno.EACCES]  # emptying the folder needs this permission
    if error.errno in _CAUSES:
        return _CAUSES[error.errno]
    return f"{format_size(free_bytes(folder))} are free there", "free some space"


def is_disk_full(folder: Path) -> bool:
    """Return True if the disk of `folder` has no room for even a small file."""
    return _has_no_inodes(folder) or free_bytes(folder) < _SMALL_FILE_BYTES


def _has_no_inodes(folder: Path) -> bool:
    while not folder.exists():
        folder = folder.parent
    stats = os.statvfs(folder)
    return stats.f_files > 0 and stats.f_favail == 0


def require_free_space(folder: Path, num_bytes: int) -> None:
    """Check that the disk has room for a checkpoint with tensors of `num_bytes` bytes.

    Raises:
        SaveError: the disk has not enough free space.
    """
    needed = num_bytes + _SPARE_BYTES
    free = free_bytes(folder)
    if free < needed:
        raise SaveError(
            f"a checkpoint needs {format_size(num_bytes)} and {format_size(_SPARE_BYTES)} to spare, "
            f"but {format_size(free)} are free.",
            where=str(folder),
            hint="free some space, or --run-dir on another disk; older checkpoints are unchanged",
        )
