"""Checkpointing of weight stashing: the older weights that a pipeline without flush still needs."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from paceline.checkpoint.files.checkpoint_folder import OpenCheckpoint
from paceline.checkpoint.files.manifest import rank_file
from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.shard_ownership import owned_shards, read_part
from paceline.comm.collective_errors import on_all_ranks
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.step.pipedream.pipedream_step import PipeDreamStep

STASH = "stash.safetensors"


def stash_files(
    step: object, weights: ShardedTensors, *, rank: int
) -> tuple[dict[str, list[Writable]], dict[str, Any] | None]:
    """Return this rank's older weights, named `updates ago/FQN`, and where the last batches ended.

    Return nothing for another kind of step.
    """
    if not isinstance(step, PipeDreamStep):
        return {}, None
    found: list[Writable] = []
    for number, kept in step.versions.saved().items():
        for name, tensor in kept.items():
            key = f"{step.versions.newest - number}/{name}"
            parts = weights.parts(name)
            found += owned_shards(key, dtype=tensor.dtype, find=partial(Tensor.detach, tensor), parts=parts, rank=rank)
    return ({rank_file(STASH, rank): found} if found else {}), step.place()


def load_stash(loaded: OpenCheckpoint, step: object, weights: ShardedTensors, *, is_same: bool) -> None:
    """Load the older weights; after another update rule (not `is_same`) the history starts empty.

    Every rank calls this.

    Raises:
        CheckpointError: a tensor is not what was written.
    """
    if isinstance(step, PipeDreamStep):
        place = loaded.state.get("stash") if is_same else None
        stored = loaded.files.get(STASH, StoredTensors([]))
        kept = on_all_ranks(weights.world, lambda: {} if place is None else _kept(step, stored, weights))
        step.begin(loaded.step, ends=[] if place is None else place["ends"], kept=kept)


def _kept(step: PipeDreamStep, stored: StoredTensors, weights: ShardedTensors) -> dict[int, Mapping[str, Tensor]]:
    mine = [member.name for member in step.parts.update.named]
    found: dict[int, Mapping[str, Tensor]] = {}
    ago = 1
    while mine and all(f"{ago}/{name}" in stored for name in mine):
        found[ago] = {name: read_part(stored, f"{ago}/{name}", part=weights.mine[name].part) for name in mine}
        ago += 1
    return found
