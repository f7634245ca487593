"""Checkpointing of error feedback: the part of the gradients that compression has not sent yet."""

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
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.comm.process_group import World
from paceline.parallel.compression.error_feedback_reducer import ErrorFeedbackReducer

ERROR_FEEDBACK = "held_back.safetensors"  # this name and the state's key "held_back" are fixed on disk
_SHARED = "shared"


def collect_error_feedback(reducer: object) -> tuple[dict[str, list[Writable]], dict[str, Any] | None]:
    """Return this replica's error feedback by file, and its state for the manifest, or None without error feedback.

    The tensors are named `replica/FQN`.
    """
    if not isinstance(reducer, ErrorFeedbackReducer):
        return {}, None
    writable = list(_lazy_tensors(str(reducer.replica), tensors=reducer.residuals))
    if reducer.replica == 0:
        writable += _lazy_tensors(_SHARED, tensors=reducer.shared_state)
    return ({rank_file(ERROR_FEEDBACK, reducer.replica): writable} if writable else {}), {
        "replicas": reducer.num_replicas
    }


def load_error_feedback(checkpoint: OpenCheckpoint, reducer: object, *, world: World) -> None:
    """Load this replica's error feedback: an equal share of the sum if the number of replicas has changed.

    Every rank calls this.

    Raises:
        CheckpointError: a tensor's bytes do not match their digest.
    """
    saved = checkpoint.state.get("held_back")
    if isinstance(reducer, ErrorFeedbackReducer) and saved is not None:
        stored = checkpoint.files.get(ERROR_FEEDBACK, StoredTensors([]))
        run_on_all_ranks(world, lambda: _load_errors(stored, reducer, num_replicas=int(saved["replicas"])))


def _load_errors(stored: StoredTensors, reducer: ErrorFeedbackReducer, *, num_replicas: int) -> None:
    """Load the stored tensors; a parameter that was not trained when the checkpoint was saved starts at zero."""
    for name, tensor in reducer.residuals.items():
        if f"0/{name}" not in stored:
            tensor.zero_()
        elif num_replicas == reducer.num_replicas:
            tensor.copy_(from_bytes(stored[f"{reducer.replica}/{name}"]))
        else:
            tensor.copy_(_sum_over_replicas(stored, name, num_replicas, like=tensor) / reducer.num_replicas)
    for name, tensor in reducer.shared_state.items():
        if f"{_SHARED}/{name}" in stored:
            tensor.copy_(from_bytes(stored[f"{_SHARED}/{name}"]))


def _sum_over_replicas(stored: StoredTensors, name: str, num_replicas: int, *, like: Tensor) -> Tensor:
    """Return the sum over the saved replicas. They are added in order, so that all ranks get the same bits."""
    total = torch.zeros(like.shape, dtype=like.dtype)
    for replica in range(num_replicas):
        total += from_bytes(stored[f"{replica}/{name}"])
    return total


def _lazy_tensors(prefix: str, *, tensors: Mapping[str, Tensor]) -> Iterator[Writable]:
    for name, tensor in tensors.items():
        get_tensor = partial(Tensor.detach, tensor)
        yield lazy_tensor(f"{prefix}/{name}", dtype=tensor.dtype, shape=tuple(tensor.shape), get_tensor=get_tensor)
