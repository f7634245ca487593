"""Following a job that was handed in: its output, until it ends. The schedulers' own commands are used."""

import re
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.errors import ExitCode, MachineError

_POLL_SECONDS = 2.0
_EXIT_CODE = re.compile(r"ExitCode=(\d+):")


def follow_slurm(script: Path, *, report: Callable[[str], None]) -> int:
    """Hand a script in, print its output and the changes of its state, and return the exit code of the job.

    Raises:
        MachineError: a command of Slurm is missing or fails.
    """
    job = _run(["sbatch", "--parsable", str(script)]).strip().partition(";")[0]
    output, position, state = script.parent / f"slurm-{job}.out", 0, ""
    report(f"job {job}")
    while True:
        new_state = _run(["squeue", "--noheader", "--jobs", job, "--format", "%T %R"], may_fail=True).strip()
        if new_state and new_state != state:
            report(f"job {job}: {new_state.lower()}")
        state = new_state
        position = _print_new_output(output, position, report)
        if not state:
            break
        time.sleep(_POLL_SECONDS)
    position = _print_new_output(output, position, report)
    found = _EXIT_CODE.search(_run(["scontrol", "show", "job", job], may_fail=True))
    return int(found[1]) if found else int(ExitCode.DONE)


def follow_kubernetes(command: Sequence[str], name: str) -> int:
    """Hand a file in, and print the logs of node 0 until the job ends.

    Raises:
        MachineError: kubectl is missing or fails.
    """
    _run(command)
    selector = f"batch.kubernetes.io/job-completion-index=0,jobset.sigs.k8s.io/jobset-name={name}"
    wait = ["kubectl", "wait", "--for=condition=Ready", "pod", "--selector", selector, "--timeout=1h"]
    _run(wait)
    logs = ["kubectl", "logs", "--follow", "--selector", selector, "--tail=-1"]
    return subprocess.run(logs, check=False).returncode


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


def _run(command: Sequence[str], *, may_fail: bool = False) -> str:
    """Return the output of a command.

    Raises:
        MachineError: it is missing or, unless it `may_fail`, fails.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MachineError(
            f"{command[0]} is not installed here.", hint="leave --follow out, and hand the file in where it is"
        ) from None
    if done.returncode and not may_fail:
        raise MachineError(f"{' '.join(command)} failed: {done.stderr.strip()}.")
    return done.stdout
