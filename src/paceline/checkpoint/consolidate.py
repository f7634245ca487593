"""Consolidated weights in the folder format of transformers and vLLM, gathered one tensor at a time."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from paceline.checkpoint.files.hf_folder import MAX_FILE_BYTES, write_model_folder
from paceline.checkpoint.files.safetensors_io import LazyTensor
from paceline.checkpoint.state_dict_view import StateDictView
from paceline.checkpoint.tensor_bytes import lazy_tensor
from paceline.comm.collective_errors import raise_on_all_ranks
from paceline.comm.process_group import World
from paceline.errors import CheckpointError, SaveError
from paceline.filesystem.disk_full import convert_to_save_error


def consolidate_weights(
    view: StateDictView, folder: Path, *, config: Any, world: World, max_bytes: int = MAX_FILE_BYTES
) -> Path:
    """Write all entries of `view` to `folder` as unsharded safetensors, and return the folder.

    If ranks hold shards, every rank calls this, and rank 0 writes. No process has more than one full tensor in memory.

    Raises:
        SaveError: the folder can't be written.
    """
    full_tensors = view.full_tensors(list(view.entries))
    problem: CheckpointError | None = None
    if world.is_main:
        try:
            if not folder.parent.is_dir():
                raise SaveError(f"the run folder {folder.parent} was moved or removed.", where=str(folder))
            with convert_to_save_error("the consolidated weights", folder):
                if folder.exists() and not folder.is_dir():
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))  # a file of the user
                write_model_folder(
                    folder, _lazy_tensors(view, full_tensors), config=_config_json(config), max_bytes=max_bytes
                )
        except CheckpointError as error:
            problem = error
    for _ in full_tensors if not view.weights.is_unsharded else ():
        pass  # gathering a tensor is a collective call, which rank 0 joins even if it can't write
    if not view.weights.is_unsharded:
        raise_on_all_ranks(world, problem)
    elif problem is not None:
        raise problem
    return folder


def _lazy_tensors(view: StateDictView, full_tensors: Iterator[tuple[str, Tensor]]) -> list[LazyTensor]:
    return [
        lazy_tensor(
            name,
            dtype=local.dtype,
            shape=local.shard_spec.shape,
            get_tensor=lambda name=name: _take_tensor(full_tensors, name),  # type: ignore[misc]
        )
        for name, local in view.entries.items()
    ]


def _take_tensor(full_tensors: Iterator[tuple[str, Tensor]], name: str) -> Tensor:
    next_name, tensor = next(full_tensors)
    assert next_name == name
    return tensor


def _config_json(config: Any) -> Any:
    return config.to_dict() if hasattr(config, "to_dict") else None
