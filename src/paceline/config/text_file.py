"""Reading of text files that a user gives."""

from pathlib import Path

from paceline.errors import UsageError

_MOST_BYTES = 4 << 20


def _refused(path: Path) -> str:
    """Return why a path can't be read as text, or an empty string; a shell's pipe (`<(...)`) may be read."""
    if path.is_dir():
        return "a folder"
    if path.is_char_device() or path.is_block_device() or path.is_socket():
        return "a device"
    return f"larger than {_MOST_BYTES:,} bytes" if path.stat().st_size > _MOST_BYTES else ""


def given_text(path: Path, *, what: str, hint: str) -> str:
    """Return the text of a file. An error names the `expected` kind of file and shows `hint`, an example.

    Raises:
        UsageError: the file is not text, or can't be read. FileNotFoundError: there is no such file.
    """
    try:
        if path.exists() and (kind := _refused(path)):
            raise UsageError(f"{path} can't be read: it is {kind}, not {what}.", hint=hint)
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path.name} is not text, but {what} must be.",
            where=f"{path}, byte {error.start}",
            cause="the wrong file, or a file that was not saved as UTF-8",
            hint=hint,
        ) from None
    except (OSError, ValueError) as error:  # such as an invalid character in the name
        said = getattr(error, "strerror", None) or error
        hint = f"ls -l {path}" if isinstance(error, PermissionError) else hint
        raise UsageError(f"{path.name!r} can't be read: {said}.", where=repr(str(path)), hint=hint) from None
