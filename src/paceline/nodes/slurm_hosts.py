"""The host names of a Slurm step, from Slurm's own short form, such as `node[1-3,07],login`.

`scontrol show hostnames` prints the same, but is not installed on every compute node.
"""

import re
from itertools import product

_HOST = re.compile(r"(?:[^,\[]+|\[[^\]]*\])+")
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


def _expand_ranges(text: str) -> list[str]:
    """Return the numbers of `001-003,10`, with their leading zeros."""
    numbers: list[str] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers
