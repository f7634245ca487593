"""Escape control characters in text from untrusted files, and replace characters that a terminal can't show."""

import codecs
import re
from typing import TextIO

_ASCII_SUBSTITUTES = {"✓": "ok", "✗": "x", "×": "x", "·": "-", "•": "*", "…": "...", "→": "->", "≤": "<=", "≥": ">="}
_ERROR_HANDLER = "paceline.plainly"
# Characters that end a line, or change the direction of text:
_LINE_AND_DIRECTION_MARKS = "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_CONTROL_CHARACTERS = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_LINE_AND_DIRECTION_MARKS}]")
_JOB_CONTROL_CHARACTERS = re.compile(
    f"\x1b(?!\\[[0-9;]*m)|[\x00-\x07\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f{_LINE_AND_DIRECTION_MARKS}]"
)


def encodable_text(text: str, stream: TextIO) -> str:
    """Return the text with control characters escaped, and with characters that the stream can't encode replaced.

    Names and messages may come from untrusted files: an escape sequence in one could overwrite earlier output.
    """
    return _encodable(_CONTROL_CHARACTERS.sub(_escape_characters, text), stream)


def encodable_job_output(text: str, stream: TextIO) -> str:
    """Return a line that the user's own code printed: like `encodable_text`, but with colours and carriage returns."""
    return _encodable(_JOB_CONTROL_CHARACTERS.sub(_escape_characters, text), stream)


def _escape_characters(match: re.Match[str]) -> str:
    return "".join(
        f"\\x{ord(character):02x}" if ord(character) < 256 else f"\\u{ord(character):04x}" for character in match[0]
    )


def _encodable(text: str, stream: TextIO) -> str:
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, _ERROR_HANDLER).decode(encoding)


def _substitute_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(
        _ASCII_SUBSTITUTES.get(character, "?") for character in error.object[error.start : error.end]
    ), error.end


codecs.register_error(_ERROR_HANDLER, _substitute_ascii)
