"""Abilities of each `torch.distributed` backend: which are built in, and which operations they have.

The table is checked line by line by `tests/profiling/test_backends.py`, for the backends that the machine has.
"""

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Ability:
    """An operation, with the device types on which each backend supports it."""

    operation: str
    gloo: frozenset[str]
    nccl: frozenset[str]


CPU, GPU, BOTH = frozenset({"cpu"}), frozenset({"cuda"}), frozenset({"cpu", "cuda"})
ABILITIES = (
    Ability(operation="send and receive", gloo=CPU, nccl=GPU),
    Ability(operation="broadcast", gloo=BOTH, nccl=GPU),
    Ability(operation="all_reduce", gloo=BOTH, nccl=GPU),
    Ability(operation="all_reduce of int64", gloo=BOTH, nccl=GPU),
    Ability(operation="all_reduce of bf16", gloo=BOTH, nccl=GPU),
    Ability(operation="all_reduce, maximum", gloo=BOTH, nccl=GPU),
    Ability(operation="all_reduce, average", gloo=CPU, nccl=GPU),
    Ability(operation="reduce", gloo=CPU, nccl=GPU),
    Ability(operation="all_gather", gloo=CPU, nccl=GPU),
    Ability(operation="gather", gloo=CPU, nccl=GPU),
    Ability(operation="scatter", gloo=CPU, nccl=GPU),
    Ability(operation="reduce_scatter", gloo=CPU, nccl=GPU),
    Ability(operation="all_to_all", gloo=CPU, nccl=GPU),
    Ability(operation="barrier", gloo=CPU, nccl=GPU),
)


def built_in() -> tuple[str, ...]:
    """Return the backends that this build of torch has."""
    asked = {
        "nccl": dist.is_nccl_available,
        "gloo": dist.is_gloo_available,
        "mpi": dist.is_mpi_available,
        "ucc": dist.is_ucc_available,
    }
    return tuple(name for name, has in asked.items() if has())
