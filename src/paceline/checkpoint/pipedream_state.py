"""Checkpointing of weight stashing: the older weights that a pipeline without flush still needs."""

from collections.abc import Mapping
from dataclasses import dataclass
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
Files = dict[str, list[Writable]]


@dataclass(frozen=True, kw_only=True)
class StashedWeightsState:
    """What weight stashing adds to a checkpoint: this rank's older weights, and where the last batches ended."""

    step: PipeDreamStep
    weights: ShardedTensors
    rank: int

    def extend(self, files: Files, state: dict[str, Any], own: Mapping[str, Tensor]) -> tuple[Files, dict[str, Any]]:
        """Add the older weights, named `updates ago/FQN`, and the places."""
        step, found = self.step, list[Writable]()
        for number, kept in step.versions.saved().items():
            for name, tensor in kept.items():
                key = f"{step.versions.newest - number}/{name}"
                parts, find = self.weights.parts(name), partial(Tensor.detach, tensor)
                found += owned_shards(key, dtype=tensor.dtype, find=find, parts=parts, rank=self.rank)
        return files | ({rank_file(STASH, self.rank): found} if found else {}), state | {"stash": step.place()}

    def view(self, loaded: OpenCheckpoint, *, is_same: bool) -> OpenCheckpoint:
        """Return the checkpoint as it is."""
        return loaded

    def load(self, loaded: OpenCheckpoint, *, is_same: bool) -> None:
        """Load the older weights; after another update rule (not `is_same`) the history starts empty.

        Every rank calls this.

        Raises:
            CheckpointError: a tensor is not what was written.
        """
        place = loaded.state.get("stash") if is_same else None
        stored = loaded.files.get(STASH, StoredTensors([]))
        step, weights = self.step, self.weights
        kept = on_all_ranks(weights.world, lambda: {} if place is None else _kept(step, stored, weights))
        step.begin(loaded.step, ends=[] if place is None else place["ends"], kept=kept)


def _kept(step: PipeDreamStep, stored: StoredTensors, weights: ShardedTensors) -> dict[int, Mapping[str, Tensor]]:
    mine = [member.name for member in step.replica.update.named]
    found: dict[int, Mapping[str, Tensor]] = {}
    ago = 1
    while mine and all(f"{ago}/{name}" in stored for name in mine):
        found[ago] = {name: read_part(stored, f"{ago}/{name}", part=weights.mine[name].part) for name in mine}
        ago += 1
    return found
