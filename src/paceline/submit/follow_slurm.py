"""Following a job of Slurm: its output, until it ends."""

import re
import time
from collections.abc import Callable
from pathlib import Path

from paceline.errors import ExitCode, MachineError
from paceline.submit.scheduler_command import run_scheduler_command

_POLL_SECONDS = 2.0
_MAX_FAILURES, _SIGNAL_BASE = 30, 128
_END_STATES = (
    "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED",
)  # fmt: skip


def follow_slurm(script: Path, *, report: Callable[[str], None]) -> int:
    """Hand a script in, print its output and the changes of its state, and return the exit code of the job.

    Raises:
        MachineError: a command of Slurm is missing or fails.
    """
    job = run_scheduler_command(["sbatch", "--parsable", str(script)]).strip().partition(";")[0]
    output, position, state, num_failures = script.parent / f"slurm-{job}.out", 0, "", 0
    description = ""
    report(f"job {job}")
    while state not in _END_STATES:
        time.sleep(_POLL_SECONDS)
        position = _print_new_output(output, position, report)
        try:
            description, num_failures = run_scheduler_command(["scontrol", "--oneliner", "show", "job", job]), 0
        except MachineError:  # the controller may be away for a moment
            num_failures += 1
            if num_failures > _MAX_FAILURES:
                raise
            continue
        new_state = _read_field(description, "JobState")
        if new_state != state:
            report(f"job {job}: {new_state.lower()}")
        state = new_state
    _print_new_output(output, position, report)
    if state == "COMPLETED":
        return int(ExitCode.DONE)
    code, _, signal_number = _read_field(description, "ExitCode").partition(":")
    return int(code or 0) or (_SIGNAL_BASE + int(signal_number) if int(signal_number or 0) else int(ExitCode.FAILED))


def _read_field(description: str, name: str) -> str:
    """Return a field of what `scontrol` says of a job; empty if there is none."""
    found = re.search(rf"\b{name}=(\S+)", description)
    return found[1] if found else ""


def _print_new_output(file: Path, position: int, report: Callable[[str], None]) -> int:
    """Print the whole lines that a file has got since `position`, and return the new position."""
    try:
        with file.open("rb") as stream:
            stream.seek(position)
            text = stream.read()
    except OSError:
        return position
    whole, newline, _ = text.rpartition(b"\n")
    for line in whole.decode(errors="replace").splitlines():
        report(line)
    return position + len(whole) + len(newline)
