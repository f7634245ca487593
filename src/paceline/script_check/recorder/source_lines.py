"""The line of the user's own code that led to a hook."""

import sys
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType

from paceline.user_code import is_user_file


def calling_line() -> str:
    """Return the innermost line of the user's code on the stack, as `file:number`; "" if there is none.

    The backward of a GPU runs in a thread of its own. Then it is the line at which the main thread waits for it.
    """
    frame = user_frame()
    return f"{_short_path(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


def user_frame() -> FrameType | None:
    """Return the innermost frame of the user's code on the stack of this thread, or else of the main thread."""
    found = _innermost_user_frame(sys._getframe(1))
    if found is None and threading.current_thread() is not threading.main_thread():
        found = _innermost_user_frame(sys._current_frames().get(threading.main_thread().ident or 0))
    return found


def variable_name(frame: FrameType | None, value: object) -> str:
    """Return the name by which a frame's code knows an object: a variable, or an attribute of `self`; or ""."""
    with suppress(Exception):  # an object of the script may refuse to show its attributes
        variables = {} if frame is None else {**frame.f_globals, **frame.f_locals}
        attributes = vars(variables["self"]) if hasattr(variables.get("self"), "__dict__") else {}
        for prefix, names in (("", variables), ("self.", attributes)):
            for name, each in list(names.items()):
                if each is value:
                    return f"{prefix}{name}"
    return ""


def _innermost_user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


@cache
def _is_user_file(name: str) -> bool:
    return is_user_file(name)


@cache
def _short_path(name: str) -> str:
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name
