"""Isolate the reference from the process group, so that user code does not see the surrounding ranks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.torch_internals.private_api import hide_process_group

_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "GROUP_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_SIZE_VARIABLES = (
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
)


@contextmanager
def single_process() -> Iterator[None]:
    """Hide the process group: `torch.distributed` and the launchers' variables show a world of one rank."""
    values = {**dict.fromkeys(_RANK_VARIABLES, "0"), **dict.fromkeys(_SIZE_VARIABLES, "1")}
    saved = {name: os.environ[name] for name in values if name in os.environ}
    os.environ.update({name: values[name] for name in saved})
    try:
        with hide_process_group():
            yield
    finally:
        os.environ.update(saved)
