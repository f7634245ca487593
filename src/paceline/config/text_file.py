"""Read text files that a user gives, with errors that name the problem."""

from pathlib import Path

from paceline.errors import UsageError

_MAX_BYTES = 4 << 20


def _unreadable_reason(path: Path) -> str:
    """Return what makes a path unreadable as text; an empty string means that it can be read.

    A shell's pipe (`<(...)`) can be read.
    """
    if path.is_dir():
        return "a folder"
    if path.is_char_device() or path.is_block_device() or path.is_socket():
        return "a device"
    return f"larger than {_MAX_BYTES:,} bytes" if path.stat().st_size > _MAX_BYTES else ""


def read_user_text(path: Path, *, expected: str, hint: str) -> str:
    """Return the text of a file. An error names the `expected` kind of file and shows `hint`, an example.

    Raises:
        UsageError: the file is not text, or can't be read.
        FileNotFoundError: there is no such file.
    """
    try:
        if path.exists() and (problem := _unreadable_reason(path)):
            raise UsageError(f"{path} can't be read: it is {problem}, not {expected}.", hint=hint)
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path.name} can't be read as {expected}: it is not a text file.",
            where=f"{path}, byte {error.start}",
            cause="the wrong file, or a file that was not saved as UTF-8",
            hint=hint,
        ) from None
    except (OSError, ValueError) as error:  # such as an invalid character in the name
        reason = getattr(error, "strerror", None) or error
        hint = f"ls -l {path}" if isinstance(error, PermissionError) else hint
        raise UsageError(f"{path.name!r} can't be read: {reason}.", where=repr(str(path)), hint=hint) from None
