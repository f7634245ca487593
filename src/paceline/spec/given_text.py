"""Text files that a user gives, as text."""

from pathlib import Path

from paceline.errors import UsageError


def given_text(path: Path, *, what: str, hint: str) -> str:
    """What a file holds. `what` it should be and a line of it go into the error.

    Raises:
        UsageError: it is no text, or can't be read. FileNotFoundError: there is none.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path.name} is no text, and {what} is.",
            where=f"{path}, byte {error.start}",
            cause="another file was meant, or it was saved in another encoding than UTF-8",
            hint=hint,
        ) from None
    except OSError as error:
        raise UsageError(f"{path.name} can't be read: {error.strerror}.", where=str(path), hint=hint) from None
