"""Checkpoints of weight stashing: the older weights that a pipeline without flush still needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from paceline.checkpoint.files.checkpoint_folder import OpenCheckpoint
from paceline.checkpoint.files.manifest import rank_file
from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.shard_ownership import owned_shards, read_shard
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.step.pipedream.pipedream_step import PipeDreamStep

STASH = "stash.safetensors"
Files = dict[str, list[Writable]]


@dataclass(frozen=True, kw_only=True)
class StashedWeightsState:
    """The checkpoint state of weight stashing: this rank's older weights, and the positions of the last batches."""

    step: PipeDreamStep
    weights: ShardedTensors
    rank: int

    def extend(
        self, files: Files, state: dict[str, Any], local_weights: Mapping[str, Tensor]
    ) -> tuple[Files, dict[str, Any]]:
        """Add the older weights to `files`, and the positions of the last batches to `state`.

        The key of an older weight is its age and its FQN: after two more updates, `fc.weight` has the key
        `2/fc.weight`.
        """
        step, writable = self.step, list[Writable]()
        for version, weights in step.versions.saved_state().items():
            for name, tensor in weights.items():
                key = f"{step.versions.newest - version}/{name}"
                shard_specs, get_tensor = self.weights.shard_specs(name), partial(Tensor.detach, tensor)
                writable += owned_shards(
                    key, dtype=tensor.dtype, get_tensor=get_tensor, shard_specs=shard_specs, rank=self.rank
                )
        return files | ({rank_file(STASH, self.rank): writable} if writable else {}), state | {
            "stash": step.batch_ends()
        }

    def view(self, loaded: OpenCheckpoint, *, is_same_rule: bool) -> OpenCheckpoint:
        """Return the checkpoint unchanged."""
        return loaded

    def load(self, loaded: OpenCheckpoint, *, is_same_rule: bool) -> None:
        """Load the older weights. If the run had another update rule (not `is_same_rule`), the history starts empty.

        Every rank calls this.

        Raises:
            CheckpointError: a tensor's bytes do not match their digest.
        """
        stash_state = loaded.state.get("stash") if is_same_rule else None
        stored = loaded.files.get(STASH, StoredTensors([]))
        step, weights = self.step, self.weights
        stashed = run_on_all_ranks(
            weights.world, lambda: {} if stash_state is None else _read_stashed_weights(step, stored, weights)
        )
        step.resume(loaded.step, ends=[] if stash_state is None else stash_state["ends"], older_weights=stashed)


def _read_stashed_weights(
    step: PipeDreamStep, stored: StoredTensors, weights: ShardedTensors
) -> dict[int, Mapping[str, Tensor]]:
    local_names = [member.name for member in step.replica.update.named_parameters]
    weights_by_age: dict[int, Mapping[str, Tensor]] = {}
    age = 1
    while local_names and all(f"{age}/{name}" in stored for name in local_names):
        weights_by_age[age] = {
            name: read_shard(stored, f"{age}/{name}", shard=weights.local_tensors[name].shard_spec)
            for name in local_names
        }
        age += 1
    return weights_by_age
