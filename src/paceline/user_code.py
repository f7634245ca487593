"""Which code is the user's own: neither ours, nor installed, nor Python's."""

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
    """Return whether a `raise` or `assert` in the user's own code made this error, and no library below it."""
    last = next(iter(extract_tb(error.__traceback__)[-1:]), None)
    return last is not None and is_users(last.filename) and _RAISES.search(last.line or "") is not None


@contextmanager
def script_words(place: str) -> Iterator[None]:
    """Let `sys.argv` be what a script at `place` that got no words has: ours are no words of the user's parser."""
    words = sys.argv
    sys.argv = [place]
    try:
        yield
    finally:
        sys.argv = words


def is_of_word_reader(error: BaseException) -> bool:
    """Return whether a parser of command lines, as argparse is, raised this or was asked to before."""
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _WORD_READERS:
            return True
        trace = trace.tb_next
    return False


def hide_own_frames(error: BaseException) -> None:
    """Take our frames out of an exception's traceback, and of those it came from, where they only lead to user code.

    What is below the last line of the user's own code stays: there the error was made.
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
    """Return whether a file is the user's own: neither ours, nor installed, nor Python's.

    Installed is what lies in any `site-packages` or `dist-packages`, of whatever environment of several, and what a
    distribution anywhere else on the module path records as its file (`pip install --target`). A project that is
    installed in place (`pip install -e`) stays the user's.
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
    """The folders of Python's own library, by the names that frames may have for them."""
    named = {sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib")} | {os.path.dirname(os.__file__)}  # noqa: PTH120
    return tuple(named | {os.path.realpath(name) for name in named})


def _is_recorded(path: PurePath) -> bool:
    """Whether a distribution that lies beside it on the module path has it among its files."""
    roots = [root for root in sys.path if root and path.is_relative_to(root)]
    return any(path.relative_to(root).as_posix() in _recorded(root) for root in roots)


@cache
def _recorded(root: str) -> frozenset[str]:
    """The files of the distributions in a folder; what a build leaves in a project's own folder records none."""
    found: set[str] = set()
    for folder in Path(root).glob("*.dist-info"):
        found |= {file.as_posix() for file in metadata.Distribution.at(folder).files or ()}
    return frozenset(found)
