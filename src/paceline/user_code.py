"""Detection of the user's own code: files that are not part of Paceline, of an installed package, or of Python."""

import os
import re
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path, PurePath
from traceback import extract_tb
from types import TracebackType

_INSTALLED = frozenset({"site-packages", "dist-packages"})
_RAISES = re.compile(r"(^|[:;]\s*)(raise|assert)\b")
_TYPED = ("<stdin>", "<ipython-input")
_OURS = Path(__file__).parent
_WORD_READERS = frozenset({"argparse", "optparse", "click", "docopt", "fire", "absl"})
_EXAMPLES = _OURS / "examples"


def is_users_own(error: BaseException) -> bool:
    """Return whether a `raise` or `assert` in the user's own code raised this error, and not a library below it."""
    last = next(iter(extract_tb(error.__traceback__)[-1:]), None)
    return last is not None and is_users(last.filename) and _RAISES.search(last.line or "") is not None


@contextmanager
def script_words(place: str) -> Iterator[None]:
    """Set `sys.argv` to that of a script at `path` without arguments: the user's parser must not see Paceline's."""
    words = sys.argv
    sys.argv = [place]
    try:
        yield
    finally:
        sys.argv = words


def is_of_word_reader(error: BaseException) -> bool:
    """Return whether a command-line parser such as argparse is in the traceback of this error."""
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _WORD_READERS:
            return True
        trace = trace.tb_next
    return False


def hide_own_frames(error: BaseException) -> None:
    """Remove Paceline's frames from the tracebacks of an exception and its causes if they only lead to user code.

    Frames below the last line of the user's own code are kept: the error was raised there.
    """
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        one.__traceback__ = _without_own_frames(one.__traceback__)
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def _without_own_frames(trace: TracebackType | None) -> TracebackType | None:
    rows: list[TracebackType] = []
    while trace is not None:
        rows.append(trace)
        trace = trace.tb_next
    last = max((at for at, row in enumerate(rows) if is_users(row.tb_frame.f_code.co_filename)), default=-1)
    made: TracebackType | None = None
    for at, row in reversed(list(enumerate(rows))):
        if at > last or not _is_ours(row.tb_frame.f_code.co_filename):
            made = TracebackType(made, row.tb_frame, row.tb_lasti, row.tb_lineno)
    return made


@cache
def is_users(filename: str) -> bool:
    """Return whether a file is the user's own: neither Paceline's, nor installed, nor Python's.

    A file is installed if it is in a `site-packages` or `dist-packages` folder of any environment, or if a distribution
    elsewhere on the module path lists it (`pip install --target`). A project that is installed in place (`pip install
    -e`) is the user's.
    """
    if filename.startswith("<"):
        return filename.startswith(_TYPED)
    path = PurePath(filename)
    if path.is_relative_to(_EXAMPLES):
        return True
    if _is_ours(filename) or _INSTALLED & set(path.parts) or any(path.is_relative_to(lib) for lib in _python()):
        return False
    return not _is_recorded(path)


def _is_ours(filename: str) -> bool:
    return PurePath(filename).is_relative_to(_OURS) and not PurePath(filename).is_relative_to(_EXAMPLES)


@cache
def _python() -> tuple[str, ...]:
    """Return the folders of Python's own library, by the names that frames may have for them."""
    named = {sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib")} | {os.path.dirname(os.__file__)}  # noqa: PTH120
    return tuple(named | {os.path.realpath(name) for name in named})


def _is_recorded(path: PurePath) -> bool:
    """Return whether a distribution in the same folder of the module path lists the file."""
    roots = [root for root in sys.path if root and path.is_relative_to(root)]
    return any(path.relative_to(root).as_posix() in _recorded(root) for root in roots)


@cache
def _recorded(root: str) -> frozenset[str]:
    """Return the files of the distributions in a folder; build leftovers in a project's own folder list none."""
    found: set[str] = set()
    for folder in Path(root).glob("*.dist-info"):
        found |= {file.as_posix() for file in metadata.Distribution.at(folder).files or ()}
    return frozenset(found)
