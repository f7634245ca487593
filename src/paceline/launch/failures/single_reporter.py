"""Choice of the rank that reports a failure under another launcher: the first failing rank on each machine.

Every rank has an error, and no supervisor of Paceline reads their output. The launcher is their common parent process,
so the first failing rank claims the report by creating a file that is named after that process.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.filesystem.run_lock import process_start_time
from paceline.launch.launcher_variables import detect_world
from paceline.launch.rendezvous import user_folder

_LAUNCHERS = ("torchrun", "mpirun", "mpiexec", "srun")  # each of these processes is the parent of one world at a time
_CAUSE, _ECHO = "cause", "echo"  # a failure of a rank itself; a failure that follows from another rank
_MAX_CHARACTERS = 400


@dataclass(frozen=True, kw_only=True)
class ReportScope:
    """The extent of a failing process's report: all, one line, or nothing because another rank reports the same."""

    prints_all: bool = False
    prints_line: bool = False
    is_already_reported: bool = False
    """True if another rank has reported what happened."""


def claim_report(text: str, *, environ: Mapping[str, str], is_echo: bool = False) -> ReportScope:
    """Return how much this process prints about a failure that other ranks may report too.

    Args:
        text: the failure. A rank whose failure differs from the first reported one prints one line.
        is_echo: this rank only lost the connection to another rank. The first such rank prints everything if no rank
            has reported a failure of its own, else one line. Later ones print nothing.
    """
    key = _world_key(environ)
    if key is None:
        return ReportScope(prints_all=True)
    rank, stem = key
    if not is_echo:
        first_text = _claim_file(f"{stem}-{_CAUSE}", rank, text)
        return ReportScope(
            prints_all=first_text is None,
            prints_line=first_text not in (None, text[:_MAX_CHARACTERS]),
            is_already_reported=first_text is not None,
        )
    is_already_reported = _read_claim(f"{stem}-{_CAUSE}", rank) is not None
    is_first = _claim_file(f"{stem}-{_ECHO}", rank, text) is None
    return ReportScope(
        prints_all=is_first and not is_already_reported, prints_line=is_first, is_already_reported=is_already_reported
    )


def _world_key(environ: Mapping[str, str]) -> tuple[int, str] | None:
    """Return this process's rank, and the prefix of its world's files; None if no other rank can be identified."""
    try:
        joined = detect_world(environ)
    except PacelineError:
        return None
    parent = os.getppid()
    birth = process_start_time(parent)
    if joined is None or joined.world_size == 1 or joined.kind not in _LAUNCHERS or birth is None:
        return None
    return joined.rank, f"told-{parent}-{birth}-{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _claim_file(name: str, rank: int, text: str) -> str | None:
    """Claim a file: return None if this process is the first, else the text that the first process wrote.

    A file of another process with the same rank belongs to an earlier world of the same parent process.
    """
    claimed_text = _read_claim(name, rank)
    if claimed_text is not None:
        return claimed_text
    try:
        path = user_folder() / name
        _remove_old_claims(path.parent)
        record = _read_record(path)
        if record.get("rank") == rank and record.get("pid") != os.getpid():
            path.unlink(missing_ok=True)
        temporary = path.with_name(f".{name}-{rank}")
        temporary.write_text(
            json.dumps({"rank": rank, "pid": os.getpid(), "text": text[:_MAX_CHARACTERS]}), encoding="utf-8"
        )
        try:
            path.hardlink_to(temporary)
        finally:
            temporary.unlink()
    except FileExistsError:
        return _read_claim(name, rank)
    except (OSError, PacelineError):
        pass  # without the file, every rank reports
    return None


def _read_claim(name: str, rank: int) -> str | None:
    """Return the text that another rank of this world wrote under this name, or None."""
    try:
        record = _read_record(user_folder() / name)
    except (OSError, PacelineError):
        return None
    return None if record.get("rank") in (None, rank) else str(record.get("text", ""))


def _read_record(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        record = json.loads(path.read_text(encoding="utf-8"))
        return record if isinstance(record, dict) else {}
    return {}


def _remove_old_claims(folder: Path) -> None:
    """Remove the files of worlds whose launcher has ended."""
    for path in folder.glob("told-*"):
        _, pid, birth, *rest = [*path.name.split("-"), "", ""]
        if len(rest) > 2 and pid.isdecimal() and process_start_time(int(pid)) != birth:
            path.unlink(missing_ok=True)
