"""The line of the user's own code that led to a hook."""

import sys
from pathlib import Path
from types import FrameType

from paceline.user_code import is_user_file


def calling_line() -> str:
    """Return the innermost line of the user's code on the stack, as `file:number`; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_user_file(frame.f_code.co_filename):
            return f"{_short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _short_path(name: str) -> str:
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name
