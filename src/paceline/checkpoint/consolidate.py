"""Consolidated weights in the folder format of transformers and vLLM, gathered one tensor at a time."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.files.hf_folder import MOST_BYTES, write_folder
from paceline.checkpoint.files.safetensors_io import LazyTensor
from paceline.checkpoint.state_dict_view import StateDictView
from paceline.checkpoint.tensor_bytes import lazy_tensor
from paceline.comm.collective_errors import raise_for_all
from paceline.comm.process_group import World
from paceline.errors import CheckpointError, SaveError
from paceline.filesystem.disk_full import as_checkpoint_error


def consolidate(
    listing: StateDictView, folder: Path, *, config: Any, world: World, most_bytes: int = MOST_BYTES
) -> Path:
    """Write all entries as plain safetensors. If ranks hold shards, every rank calls this; the first writes.

    No process has more than one whole tensor at a time.

    Raises:
        SaveError: it could not be written.
    """
    wholes = listing.wholes(list(listing.entries))
    problem: CheckpointError | None = None
    if world.is_main:
        try:
            if not folder.parent.is_dir():
                raise SaveError(f"the run folder {folder.parent} was moved or removed.", where=str(folder))
            with as_checkpoint_error("the consolidated weights", folder):
                if folder.exists() and not folder.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))  # the user's own file
                write_folder(folder, _tensors(listing, wholes), config=_as_json(config), most_bytes=most_bytes)
        except CheckpointError as error:
            problem = error
    for _ in wholes if not listing.weights.is_whole else ():
        pass  # a collective call for each tensor: also on the other ranks, and on a first rank that can't write
    if not listing.weights.is_whole:
        raise_for_all(world, problem)
    elif problem is not None:
        raise problem
    return folder


def _tensors(listing: StateDictView, wholes: Iterator[tuple[str, Tensor]]) -> list[LazyTensor]:
    return [
        lazy_tensor(name, dtype=held.dtype, shape=held.part.shape, find=lambda name=name: _next(wholes, name))  # type: ignore[misc]
        for name, held in listing.entries.items()
    ]


def _next(wholes: Iterator[tuple[str, Tensor]], name: str) -> Tensor:
    found, tensor = next(wholes)
    assert found == name
    return tensor


def _as_json(config: Any) -> Any:
    return config.to_dict() if hasattr(config, "to_dict") else None
