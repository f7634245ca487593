"""A disk that takes no more, in our words."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from paceline.errors import SaveError
from paceline.spec.words import size
from paceline.store.disk import free_bytes


@contextmanager
def written(what: str, folder: Path) -> Iterator[None]:
    """Whatever the system refuses meanwhile is a checkpoint's error.

    Raises:
        SaveError: no space or no permission.
    """
    try:
        yield
    except OSError as error:
        raise SaveError(
            f"{what} could not be written: {error.strerror or error}.",
            where=str(folder),
            cause=f"{size(free_bytes(folder))} are free there",
            hint="free some space; older checkpoints are untouched",
        ) from error
