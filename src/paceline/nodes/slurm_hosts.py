"""The hosts of a Slurm step, from Slurm's own short form, such as `node[1-3,07],login`, and the port where they meet.

`scontrol show hostnames` prints the same, but is not installed on every compute node.
"""

import re
from collections.abc import Mapping
from itertools import product

_HOST = re.compile(r"(?:[^,\[]+|\[[^\]]*\])+")
_FIRST_STEP_PORT, _NUM_STEP_PORTS = 20000, 9000  # below the ports that the kernel gives to others
_PART = re.compile(r"\[([^\]]*)\]|([^\[\]]+)")


def expand_hosts(text: str) -> list[str]:
    """Return the hosts of a list in Slurm's short form, in Slurm's order.

    Raises:
        ValueError: a range in brackets has no numbers.
    """
    hosts: list[str] = []
    for host in _HOST.findall(text):
        choices = [_expand_ranges(ranges) if ranges else [plain] for ranges, plain in _PART.findall(host)]
        hosts += ["".join(parts) for parts in product(*choices)]
    return hosts


def step_hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the hosts of the step, which may be other ones than those of its job (`-w`, `--relative`).

    Raises:
        KeyError, ValueError: the variables of the step are missing, or can't be read.
    """
    return expand_hosts(environ["SLURM_STEP_NODELIST"])


def step_port(environ: Mapping[str, str]) -> int:
    """Return the port on which the processes of the step meet; another step on the same host has another one.

    Raises:
        KeyError, ValueError: the variables of the step are missing, or can't be read.
    """
    job, step = int(environ["SLURM_JOB_ID"]), int(environ["SLURM_STEP_ID"])
    return _FIRST_STEP_PORT + (job * 7 + step * 131) % _NUM_STEP_PORTS


def _expand_ranges(text: str) -> list[str]:
    """Return the numbers of `001-003,10`, with their leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers
