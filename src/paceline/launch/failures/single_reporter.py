"""Choice of the rank that reports a failure under another launcher: the first failing rank on each machine.

Every rank has an error, and no agent of Paceline reads their output. The launcher is their common parent process, so
the first failing rank claims the report by creating a file that is named after that process.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.filesystem.run_lock import birth_of
from paceline.launch.environments import detect
from paceline.launch.rendezvous import home_folder

_SHARED_BY_RANKS = ("torchrun", "mpirun", "mpiexec", "srun")  # each of these processes is the parent of one world only
_CAUSE, _ECHO = "cause", "echo"
_WIDTH = 400


@dataclass(frozen=True, kw_only=True)
class ReportTurn:
    """How much a failing process prints: everything, one line, or nothing because another rank reports the same."""

    tells_all: bool = False
    tells_line: bool = False
    is_told: bool = False
    """True if another rank has reported what happened."""


def claim_turn(text: str, *, environ: Mapping[str, str], is_echo: bool = False) -> ReportTurn:
    """Return how much this process prints about a failure that other ranks may report too.

    Args:
        text: the failure; a rank whose failure differs from the first one's prints one line.
        is_echo: this rank only lost the connection to another one. One such rank prints a line, and everything only if
            no other rank has reported.
    """
    key = _key(environ)
    if key is None:
        return ReportTurn(tells_all=True)
    rank, stem = key
    if not is_echo:
        first = _claim(f"{stem}-{_CAUSE}", rank, text)
        return ReportTurn(
            tells_all=first is None, tells_line=first not in (None, text[:_WIDTH]), is_told=first is not None
        )
    is_told = _read(f"{stem}-{_CAUSE}", rank) is not None
    is_first = _claim(f"{stem}-{_ECHO}", rank, text) is None
    return ReportTurn(tells_all=is_first and not is_told, tells_line=is_first, is_told=is_told)


def _key(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return this process's rank and the world's name on this machine; None if the other ranks are unknown."""
    try:
        joined = detect(environ)
    except PacelineError:
        return None
    parent = os.getppid()
    born = birth_of(parent)
    if joined is None or joined.world_size == 1 or joined.kind not in _SHARED_BY_RANKS or born is None:
        return None
    return joined.rank, f"told-{parent}-{born}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _claim(name: str, rank: int, text: str) -> str | None:
    """Return None if this process is the first, else the text of the first one.

    A file of another process with the same rank belongs to an earlier world: a wrapper may start several in turn.
    """
    told = _read(name, rank)
    if told is not None:
        return told
    try:
        path = home_folder() / name
        _remove_old(path.parent)
        found = _found(path)
        if found.get("rank") == rank and found.get("pid") != os.getpid():
            path.unlink(missing_ok=True)
        whole = path.with_name(f".{name}-{rank}")
        whole.write_text(json.dumps({"rank": rank, "pid": os.getpid(), "text": text[:_WIDTH]}), encoding="utf-8")
        try:
            path.hardlink_to(whole)
        finally:
            whole.unlink()
    except FileExistsError:
        return _read(name, rank)
    except (OSError, PacelineError):
        pass  # then every rank reports
    return None


def _read(name: str, rank: int) -> str | None:
    """Return the text that another rank of this world wrote under this name, or None."""
    try:
        found = _found(home_folder() / name)
    except (OSError, PacelineError):
        return None
    return None if found.get("rank") in (None, rank) else str(found.get("text", ""))


def _found(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _remove_old(home: Path) -> None:
    """Remove the files of worlds whose launcher has ended."""
    for path in home.glob("told-*"):
        _, pid, born, *rest = [*path.name.split("-"), "", ""]
        if len(rest) > 2 and pid.isdecimal() and birth_of(int(pid)) != born:
            path.unlink(missing_ok=True)
