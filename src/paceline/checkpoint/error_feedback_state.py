"""Checkpointing of error feedback: the part of the gradients that replicas hold back."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.files.checkpoint_folder import OpenCheckpoint
from paceline.checkpoint.files.manifest import rank_file
from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.tensor_bytes import from_bytes, lazy_tensor
from paceline.comm.collective_errors import on_all_ranks
from paceline.comm.process_group import World
from paceline.parallel.compression.error_feedback_reducer import ErrorFeedbackReducer

HELD = "held_back.safetensors"
_SHARED = "shared"


def held_files(reducer: object) -> tuple[dict[str, list[Writable]], dict[str, Any] | None]:
    """Return this replica's held-back gradients, named `replica/FQN`, and the number of replicas, if any."""
    if not isinstance(reducer, ErrorFeedbackReducer):
        return {}, None
    found = list(_writable(str(reducer.replica), of=reducer.errors))
    if reducer.replica == 0:
        found += _writable(_SHARED, of=reducer.shared)
    return ({rank_file(HELD, reducer.replica): found} if found else {}), {"replicas": reducer.replicas}


def load_held(loaded: OpenCheckpoint, reducer: object, *, world: World) -> None:
    """Load each replica's held-back gradients; with another number of replicas each gets an equal share of the sum.

    Every rank calls this.

    Raises:
        CheckpointError: a tensor is not what was written.
    """
    said = loaded.state.get("held_back")
    if isinstance(reducer, ErrorFeedbackReducer) and said is not None:
        stored = loaded.files.get(HELD, StoredTensors([]))
        on_all_ranks(world, lambda: _load(stored, reducer, before=int(said["replicas"])))


def _load(stored: StoredTensors, reducer: ErrorFeedbackReducer, *, before: int) -> None:
    """Load the stored tensors; a parameter that has become trainable since starts as in a new run."""
    for name, tensor in reducer.errors.items():
        if f"0/{name}" not in stored:
            tensor.zero_()
        elif before == reducer.replicas:
            tensor.copy_(from_bytes(stored[f"{reducer.replica}/{name}"]))
        else:
            tensor.copy_(_summed(stored, name, before, like=tensor) / reducer.replicas)
    for name, tensor in reducer.shared.items():
        if f"{_SHARED}/{name}" in stored:
            tensor.copy_(from_bytes(stored[f"{_SHARED}/{name}"]))


def _summed(stored: StoredTensors, name: str, before: int, *, like: Tensor) -> Tensor:
    """Return the sum over replicas, added in their order, so that all get the same bits."""
    total = torch.zeros(like.shape, dtype=like.dtype)
    for replica in range(before):
        total += from_bytes(stored[f"{replica}/{name}"])
    return total


def _writable(prefix: str, *, of: Mapping[str, Tensor]) -> Iterator[Writable]:
    for name, tensor in of.items():
        find = partial(Tensor.detach, tensor)
        yield lazy_tensor(f"{prefix}/{name}", dtype=tensor.dtype, shape=tuple(tensor.shape), find=find)
