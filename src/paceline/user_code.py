"""Detection of the user's own code: files that are not part of Paceline, of an installed package, or of Python.

The examples in `paceline/examples` are treated as the user's own code.
"""

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

_INSTALL_FOLDERS = frozenset({"site-packages", "dist-packages"})
_RAISE_STATEMENT = re.compile(r"(^|[:;]\s*)(raise|assert)\b")
_INTERACTIVE_NAMES = ("<stdin>", "<ipython-input")
_PACKAGE_FOLDER = Path(__file__).parent
_ARGUMENT_PARSERS = frozenset({"argparse", "optparse", "click", "docopt", "fire", "absl"})
_EXAMPLES_FOLDER = _PACKAGE_FOLDER / "examples"


def is_raised_by_user_code(error: BaseException) -> bool:
    """Return whether a `raise` or `assert` in the user's own code raised this error, and not a library below it."""
    last_frame = next(iter(extract_tb(error.__traceback__)[-1:]), None)
    return (
        last_frame is not None
        and is_user_file(last_frame.filename)
        and _RAISE_STATEMENT.search(last_frame.line or "") is not None
    )


@contextmanager
def script_arguments(path: str) -> Iterator[None]:
    """Set `sys.argv` as for a script at `path` without arguments, so that the user's parser sees none of Paceline's."""
    saved_arguments = sys.argv
    sys.argv = [path]
    try:
        yield
    finally:
        sys.argv = saved_arguments


def is_from_argument_parser(error: BaseException) -> bool:
    """Return whether a command-line parser such as argparse is in the traceback of this error."""
    trace = error.__traceback__
    while trace is not None:
        if str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] in _ARGUMENT_PARSERS:
            return True
        trace = trace.tb_next
    return False


def hide_paceline_frames(error: BaseException) -> None:
    """Remove Paceline's frames from the tracebacks of an exception and its causes if they only lead to user code.

    Frames below the last line of the user's own code are kept: the error was raised there.
    """
    visited: set[int] = set()
    remaining: list[BaseException | None] = [error]
    while remaining:
        exception = remaining.pop()
        if exception is None or id(exception) in visited:
            continue
        visited.add(id(exception))
        exception.__traceback__ = _without_paceline_frames(exception.__traceback__)
        remaining += [exception.__cause__, exception.__context__, *getattr(exception, "exceptions", ())]


def _without_paceline_frames(trace: TracebackType | None) -> TracebackType | None:
    entries: list[TracebackType] = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    last_user_index = max(
        (index for index, entry in enumerate(entries) if is_user_file(entry.tb_frame.f_code.co_filename)), default=-1
    )
    shortened: TracebackType | None = None
    for index, entry in reversed(list(enumerate(entries))):
        if index > last_user_index or not _is_package_file(entry.tb_frame.f_code.co_filename):
            shortened = TracebackType(shortened, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shortened


@cache
def is_user_file(filename: str) -> bool:
    """Return whether a file is the user's own: neither Paceline's, nor installed, nor Python's.

    A file is installed if it is in a `site-packages` or `dist-packages` folder of any environment, or if a distribution
    elsewhere on the module path lists it (`pip install --target`). A project that is installed in place (`pip install
    -e`) is the user's. So are the examples in `paceline/examples`.
    """
    if filename.startswith("<"):
        return filename.startswith(_INTERACTIVE_NAMES)
    path = PurePath(filename)
    if path.is_relative_to(_EXAMPLES_FOLDER):
        return True
    if (
        _is_package_file(filename)
        or _INSTALL_FOLDERS & set(path.parts)
        or any(path.is_relative_to(folder) for folder in _python_folders())
    ):
        return False
    return not _is_in_distribution(path)


def _is_package_file(filename: str) -> bool:
    return PurePath(filename).is_relative_to(_PACKAGE_FOLDER) and not PurePath(filename).is_relative_to(
        _EXAMPLES_FOLDER
    )


@cache
def _python_folders() -> tuple[str, ...]:
    """Return the folders of Python's own library, both as configured and with symbolic links resolved."""
    folders = {sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib")} | {os.path.dirname(os.__file__)}  # noqa: PTH120
    return tuple(folders | {os.path.realpath(folder) for folder in folders})


def _is_in_distribution(path: PurePath) -> bool:
    """Return whether a distribution in the same folder of the module path lists the file."""
    roots = [root for root in sys.path if root and path.is_relative_to(root)]
    return any(path.relative_to(root).as_posix() in _distribution_files(root) for root in roots)


@cache
def _distribution_files(root: str) -> frozenset[str]:
    """Return the files that the distributions in a folder list."""
    files: set[str] = set()
    for folder in Path(root).glob("*.dist-info"):
        files |= {file.as_posix() for file in metadata.Distribution.at(folder).files or ()}
    return frozenset(files)
