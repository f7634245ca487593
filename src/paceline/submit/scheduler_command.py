"""A command of a scheduler, such as `sbatch` or `kubectl`, and what it prints."""

import subprocess
from collections.abc import Sequence

from paceline.errors import MachineError

_SECONDS = 60.0


def run_scheduler_command(command: Sequence[str]) -> str:
    """Return the output of a command.

    Raises:
        MachineError: it is missing, fails, or does not end within a minute.
    """
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=_SECONDS
        )
    except FileNotFoundError:
        raise MachineError(
            f"{command[0]} is not installed here.", hint="leave --follow out, and hand the file in where it is"
        ) from None
    except subprocess.TimeoutExpired:
        raise MachineError(f"{' '.join(command)} has said nothing for {_SECONDS:.0f} s.") from None
    if done.returncode:
        raise MachineError(f"{' '.join(command)} failed: {done.stderr.strip()}.")
    return done.stdout
