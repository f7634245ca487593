"""The state of local SGD in a checkpoint: the sites' mean as the model, and each site's own weights and optimizers."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from paceline.checkpoint.files.checkpoint_folder import OpenCheckpoint
from paceline.checkpoint.files.manifest import rank_file
from paceline.checkpoint.files.resharding_reader import StoredTensors
from paceline.checkpoint.files.safetensors_io import Writable
from paceline.checkpoint.shard_ownership import owned_shards, read_shard
from paceline.checkpoint.train_state import OPTIMIZER
from paceline.comm.collective_errors import run_on_all_ranks
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.step.local_sgd.local_sgd_step import LocalStep
from paceline.step.local_sgd.site_synchronizer import SiteSynchronizer
from paceline.trainer.setup.build_training_setup import TrainingSetup

OUTER_FILE, SITE_WEIGHTS_FILE = "outer.safetensors", "weights.safetensors"
_PER_SITE_STATE = ("optimizers", "schedules", "scaler", "extra_state")

Files = dict[str, list[Writable]]


def get_site_synchronizer(setup: TrainingSetup) -> SiteSynchronizer | None:
    """Return the synchronizer of the sites under local SGD, else None."""
    return setup.step.site_synchronizer if isinstance(setup.step, LocalStep) else None


def is_writer(setup: TrainingSetup) -> bool:
    """Return True if this rank's site writes the state that all sites share."""
    synchronizer = get_site_synchronizer(setup)
    return synchronizer is None or synchronizer.site_index == 0


@dataclass(frozen=True, kw_only=True)
class SitesState:
    """The state that sites add to a checkpoint: their own weights and optimizers, and the synchronised weights."""

    setup: TrainingSetup
    synchronizer: SiteSynchronizer

    def extend(
        self, files: Files, state: dict[str, Any], local_weights: Mapping[str, Tensor]
    ) -> tuple[Files, dict[str, Any]]:
        """Return this rank's files and JSON state, extended for sites. Every rank must call this.

        The key `due` has, for each fragment, the step at which its synchronised weights are applied, or None.
        """
        setup, synchronizer = self.setup, self.synchronizer
        site_files = files if synchronizer.site_index == 0 else {}
        rank = setup.site.rank
        stem = OPTIMIZER.partition(".")[0]
        site_files = site_files | {
            _site_file(synchronizer.site_index, name): writables
            for name, writables in files.items()
            if name.startswith(stem)
        }
        site_files[_site_file(synchronizer.site_index, rank_file(SITE_WEIGHTS_FILE, rank))] = [
            shard for name, tensor in local_weights.items() for shard in _writable_shards(setup, name, name, tensor)
        ]
        if synchronizer.site_index == 0:
            site_files[rank_file(OUTER_FILE, rank)] = [
                shard
                for fragment in synchronizer.fragments
                for kind, name, tensor in fragment.saved_state()
                for shard in _writable_shards(setup, f"{kind}/{name}", name, tensor)
            ]
        site_states = synchronizer.peers.gather_json({name: state[name] for name in _PER_SITE_STATE})
        due_steps = [fragment.due_step for fragment in synchronizer.fragments]
        files = {name: writables for name, writables in site_files.items() if writables}
        return files, state | {"sites": site_states, "due": due_steps}

    def view(self, loaded: OpenCheckpoint, *, is_same_rule: bool) -> OpenCheckpoint:
        """Return the checkpoint as this rank's site reads it.

        If another update rule saved the checkpoint (`is_same_rule` is False), all sites read the same state.
        """
        synchronizer = self.synchronizer
        if not is_same_rule:
            return loaded
        prefix = _site_file(synchronizer.site_index, "")
        files = {name.removeprefix(prefix): stored for name, stored in loaded.files.items() if name.startswith(prefix)}
        return replace(
            loaded, files=loaded.files | files, state=loaded.state | loaded.state["sites"][synchronizer.site_index]
        )

    def load(self, loaded: OpenCheckpoint, *, is_same_rule: bool) -> None:
        """Load this site's own weights and the synchronised weights of all sites. Every rank must call this.

        Raises:
            CheckpointError: a stored tensor is damaged.
        """
        setup, synchronizer = self.setup, self.synchronizer
        if not is_same_rule:
            synchronizer.reset()
            return
        stored = loaded.files.get(SITE_WEIGHTS_FILE, StoredTensors([]))
        site_weights = run_on_all_ranks(
            setup.site, lambda: {name: _read_shard(stored, name, name, setup) for name in stored}
        )
        synchronizer.restore(
            {name: tensor for name, tensor in site_weights.items() if tensor is not None}, step=loaded.step
        )
        outer = loaded.files.get(OUTER_FILE, StoredTensors([]))

        def find(kind: str, name: str) -> Tensor | None:
            return _read_shard(outer, f"{kind}/{name}", name, setup)

        def restore() -> None:
            for fragment, due in zip(synchronizer.fragments, loaded.state["due"], strict=True):
                fragment.restore(find, due_step=due)

        run_on_all_ranks(setup.site, restore)


def _site_file(site: int, name: str) -> str:
    return f"site-{site}.{name}"


def _writable_shards(setup: TrainingSetup, key: str, name: str, tensor: Tensor) -> Iterator[Writable]:
    """Yield what this rank writes of `tensor` under `key`. `tensor` is sharded like the tensor `name` of the model."""
    specs = _sharding_of(setup, name).shard_specs(name)
    yield from owned_shards(
        key, dtype=tensor.dtype, get_tensor=partial(Tensor.detach, tensor), shard_specs=specs, rank=setup.site.rank
    )


def _read_shard(stored: StoredTensors, key: str, name: str, setup: TrainingSetup) -> Tensor | None:
    spec = _sharding_of(setup, name).local_tensors[name].shard_spec
    return None if key not in stored or spec.local_shape is None else read_shard(stored, key, shard=spec)


def _sharding_of(setup: TrainingSetup, name: str) -> ShardedTensors:
    """Return the optimizer's sharding if the optimizer has the tensor `name`, else the model's sharding."""
    return setup.optim_shards if name in setup.optim_shards.local_tensors else setup.weights
