"""The state of local SGD sites in a checkpoint: their mean as the model, and each site's own weights and optimizers."""

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


def get_sites(setup: TrainingSetup) -> SiteSynchronizer | None:
    """Return the outer optimizer if there are several sites, else None."""
    return setup.step.site_synchronizer if isinstance(setup.step, LocalStep) else None


def is_writer(setup: TrainingSetup) -> bool:
    """Return True if this rank's site writes the state that all sites share."""
    sites = get_sites(setup)
    return sites is None or sites.site_index == 0


@dataclass(frozen=True, kw_only=True)
class SitesState:
    """The state that sites add to a checkpoint: their own weights and optimizers, and the last averaged weights."""

    setup: TrainingSetup
    sites: SiteSynchronizer

    def extend(
        self, files: Files, state: dict[str, Any], local_weights: Mapping[str, Tensor]
    ) -> tuple[Files, dict[str, Any]]:
        """Return this rank's files and JSON state, extended for sites. Every rank must call this."""
        setup, sites = self.setup, self.sites
        site_files = files if sites.site_index == 0 else {}
        rank = setup.site.rank
        stem = OPTIMIZER.partition(".")[0]
        site_files = site_files | {
            _site_file(sites.site_index, name): rows for name, rows in files.items() if name.startswith(stem)
        }
        site_files[_site_file(sites.site_index, rank_file(SITE_WEIGHTS_FILE, rank))] = [
            row for name, tensor in local_weights.items() for row in _writable_shards(setup, name, name, tensor)
        ]
        if sites.site_index == 0:
            rows = [
                row
                for fragment in sites.fragments
                for kind, name, tensor in fragment.saved_state()
                for row in _writable_shards(setup, f"{kind}/{name}", name, tensor)
            ]
            site_files[rank_file(OUTER_FILE, rank)] = rows
        site_states = sites.peers.gather_json({name: state[name] for name in _PER_SITE_STATE})
        due_averages = [fragment.due_step for fragment in sites.fragments]
        return {name: rows for name, rows in site_files.items() if rows}, state | {
            "sites": site_states,
            "due": due_averages,
        }

    def view(self, loaded: OpenCheckpoint, *, is_same: bool) -> OpenCheckpoint:
        """Return the checkpoint as this rank's site reads it.

        If another rule saved it (not `is_same`), all sites start equal.
        """
        sites = self.sites
        if not is_same:
            return loaded
        prefix = _site_file(sites.site_index, "")
        files = {name.removeprefix(prefix): stored for name, stored in loaded.files.items() if name.startswith(prefix)}
        return replace(loaded, files=loaded.files | files, state=loaded.state | loaded.state["sites"][sites.site_index])

    def load(self, loaded: OpenCheckpoint, *, is_same: bool) -> None:
        """Load this site's own weights and the weights that all sites agreed on. Every rank must call this.

        Raises:
            CheckpointError: a stored tensor is damaged.
        """
        setup, sites = self.setup, self.sites
        if not is_same:
            sites.reset()
            return
        stored = loaded.files.get(SITE_WEIGHTS_FILE, StoredTensors([]))
        site_weights = run_on_all_ranks(
            setup.site, lambda: {name: _read_shard(stored, name, name, setup) for name in stored}
        )
        sites.restore({name: tensor for name, tensor in site_weights.items() if tensor is not None}, step=loaded.step)
        outer = loaded.files.get(OUTER_FILE, StoredTensors([]))

        def find(kind: str, name: str) -> Tensor | None:
            return _read_shard(outer, f"{kind}/{name}", name, setup)

        def restore() -> None:
            for fragment, due in zip(sites.fragments, loaded.state["due"], strict=True):
                fragment.restore(find, due_step=due)

        run_on_all_ranks(setup.site, restore)


def _site_file(site: int, name: str) -> str:
    return f"site-{site}.{name}"


def _writable_shards(setup: TrainingSetup, key: str, name: str, tensor: Tensor) -> Iterator[Writable]:
    parts = _sharding_of(setup, name).shard_specs(name)
    yield from owned_shards(
        key, dtype=tensor.dtype, get_tensor=partial(Tensor.detach, tensor), parts=parts, rank=setup.site.rank
    )


def _read_shard(stored: StoredTensors, key: str, name: str, setup: TrainingSetup) -> Tensor | None:
    part = _sharding_of(setup, name).local_tensors[name].shard_spec
    return None if key not in stored or part.local_shape is None else read_shard(stored, key, shard=part)


def _sharding_of(setup: TrainingSetup, name: str) -> ShardedTensors:
    """Return the optimizer's sharding of a tensor if the optimizer holds it, else the model's."""
    return setup.optim_shards if name in setup.optim_shards.local_tensors else setup.weights
