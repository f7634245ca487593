"""What replicas hold back of their gradients (error feedback), in a checkpoint and back."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.place.compress.held import HeldReducer
from paceline.store.checkpoints import Loaded
from paceline.store.manifest import rank_file
from paceline.store.pieces import Stored
from paceline.store.tensors import Writable
from paceline.train.convert import from_bytes, later
from paceline.train.together import together
from paceline.world import World

HELD = "held_back.safetensors"
_SHARED = "shared"


def held_files(reducer: object) -> tuple[dict[str, list[Writable]], dict[str, Any] | None]:
    """What this replica holds back, as `replica/FQN`, and of how many it is one; nothing where none is."""
    if not isinstance(reducer, HeldReducer):
        return {}, None
    found = list(_writable(str(reducer.replica), of=reducer.errors))
    if reducer.replica == 0:
        found += _writable(_SHARED, of=reducer.shared)
    return ({rank_file(HELD, reducer.replica): found} if found else {}), {"replicas": reducer.replicas}


def load_held(loaded: Loaded, reducer: object, *, world: World) -> None:
    """Give each replica its own back; with another number of them each gets an equal share of the sum of all.

    Every rank calls this.

    Raises:
        CheckpointError: a tensor is not what was written.
    """
    said = loaded.state.get("held_back")
    if isinstance(reducer, HeldReducer) and said is not None:
        stored = loaded.files.get(HELD, Stored([]))
        together(world, lambda: _load(stored, reducer, before=int(said["replicas"])))


def _load(stored: Stored, reducer: HeldReducer, *, before: int) -> None:
    """What is not there, of a parameter that has become trainable since, begins as in a new run."""
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


def _summed(stored: Stored, name: str, before: int, *, like: Tensor) -> Tensor:
    """In the order of replicas, so that all get the same bits."""
    total = torch.zeros(like.shape, dtype=like.dtype)
    for replica in range(before):
        total += from_bytes(stored[f"{replica}/{name}"])
    return total


def _writable(prefix: str, *, of: Mapping[str, Tensor]) -> Iterator[Writable]:
    for name, tensor in of.items():
        find = partial(Tensor.detach, tensor)
        yield later(f"{prefix}/{name}", dtype=tensor.dtype, shape=tuple(tensor.shape), find=find)
