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
from paceline.checkpoint.shard_ownership import owned_shards, read_part
from paceline.checkpoint.train_state import OPTIMIZER
from paceline.comm.collective_errors import on_all_ranks
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.step.local_sgd.fragment_schedule import FragmentSchedule
from paceline.step.local_sgd.local_sgd_step import LocalStep
from paceline.trainer.setup.build_training_setup import TrainingSetup

OUTER, OWN = "outer.safetensors", "weights.safetensors"
_ITS_OWN = ("optimizers", "schedules", "scaler", "extra_state")

Files = dict[str, list[Writable]]


def sites_of(built: TrainingSetup) -> FragmentSchedule | None:
    """Return the outer optimizer if there are several sites, else None."""
    return built.step.sites if isinstance(built.step, LocalStep) else None


def is_writer(built: TrainingSetup) -> bool:
    """Return True if this rank's site writes the state that all sites share."""
    sites = sites_of(built)
    return sites is None or sites.number == 0


@dataclass(frozen=True, kw_only=True)
class SitesState:
    """The state that sites add to a checkpoint: their own weights and optimizers, and the last averaged weights."""

    built: TrainingSetup
    sites: FragmentSchedule

    def extend(self, files: Files, state: dict[str, Any], own: Mapping[str, Tensor]) -> tuple[Files, dict[str, Any]]:
        """Return this rank's files and JSON state, extended for sites. Every rank must call this."""
        built, sites = self.built, self.sites
        found = files if sites.number == 0 else {}
        rank = built.site.rank
        stem = OPTIMIZER.partition(".")[0]
        found = found | {_of(sites.number, name): rows for name, rows in files.items() if name.startswith(stem)}
        found[_of(sites.number, rank_file(OWN, rank))] = [
            row for name, tensor in own.items() for row in _pieces(built, name, name, tensor)
        ]
        if sites.number == 0:
            rows = [
                row
                for fragment in sites.fragments
                for what, name, tensor in fragment.saved()
                for row in _pieces(built, f"{what}/{name}", name, tensor)
            ]
            found[rank_file(OUTER, rank)] = rows
        each = sites.peers.gather_json({name: state[name] for name in _ITS_OWN})
        due = [fragment.due for fragment in sites.fragments]
        return {name: rows for name, rows in found.items() if rows}, state | {"sites": each, "due": due}

    def view(self, loaded: OpenCheckpoint, *, is_same: bool) -> OpenCheckpoint:
        """Return the checkpoint as this rank's site reads it.

        If another rule saved it (not `is_same`), all sites start equal.
        """
        sites = self.sites
        if not is_same:
            return loaded
        prefix = _of(sites.number, "")
        files = {name.removeprefix(prefix): stored for name, stored in loaded.files.items() if name.startswith(prefix)}
        return replace(loaded, files=loaded.files | files, state=loaded.state | loaded.state["sites"][sites.number])

    def load(self, loaded: OpenCheckpoint, *, is_same: bool) -> None:
        """Load this site's own weights and the weights that all sites agreed on. Every rank must call this.

        Raises:
            CheckpointError: a stored tensor is damaged.
        """
        built, sites = self.built, self.sites
        if not is_same:
            sites.begin()
            return
        stored = loaded.files.get(OWN, StoredTensors([]))
        own = on_all_ranks(built.site, lambda: {name: _read(stored, name, name, built) for name in stored})
        sites.restore({name: tensor for name, tensor in own.items() if tensor is not None}, step=loaded.step)
        outer = loaded.files.get(OUTER, StoredTensors([]))

        def find(what: str, name: str) -> Tensor | None:
            return _read(outer, f"{what}/{name}", name, built)

        def restore() -> None:
            for fragment, due in zip(sites.fragments, loaded.state["due"], strict=True):
                fragment.restore(find, due=due)

        on_all_ranks(built.site, restore)


def _of(site: int, name: str) -> str:
    return f"site-{site}.{name}"


def _pieces(built: TrainingSetup, key: str, name: str, tensor: Tensor) -> Iterator[Writable]:
    parts = _holding(built, name).parts(name)
    yield from owned_shards(
        key, dtype=tensor.dtype, find=partial(Tensor.detach, tensor), parts=parts, rank=built.site.rank
    )


def _read(stored: StoredTensors, key: str, name: str, built: TrainingSetup) -> Tensor | None:
    part = _holding(built, name).mine[name].part
    return None if key not in stored or part.local is None else read_part(stored, key, part=part)


def _holding(built: TrainingSetup, name: str) -> ShardedTensors:
    """Return the optimizer's sharding of a tensor if the optimizer holds it, else the model's."""
    return built.kept if name in built.kept.mine else built.weights
