"""A cheap check that the replicas are equal, made every `train.check_every` steps. It names the first difference."""

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from paceline.errors import DesyncError
from paceline.parallel.module_access.tensor_access import bits_checksum
from paceline.trainer.saving.local_sgd_state import get_site_synchronizer
from paceline.trainer.setup.build_training_setup import TrainingSetup

_AVERAGE = "the average (ema) of "
_NO_CHECKSUM = torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class ReplicaMismatch:
    """The first tensor that differs between ranks.

    `ranks` are the ranks whose copy of the tensor differs from the copy on the lowest rank. If the tensor is sharded,
    each shard is compared with the copy on the lowest rank that has the same shard. In total, `num_differing` of
    `num_tensors` tensors differ.
    """

    name: str
    ranks: list[int]
    num_differing: int
    num_tensors: int

    @override
    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        return (
            f"{self.name} differs on rank {ranks} from the copy on the lowest rank "
            f"({self.num_differing} of {self.num_tensors} tensors differ)"
        )


def check_replicas(setup: TrainingSetup, *, step: int) -> None:
    """Compare a checksum of every parameter, and of its average (EMA), between the ranks.

    Raises:
        DesyncError: a tensor differs; the error names the first such tensor, and the ranks whose copies differ.
    """
    synchronizer = get_site_synchronizer(setup)
    differing_tensor = None if synchronizer is None else synchronizer.find_difference()
    if differing_tensor is not None:
        raise DesyncError(
            f"at step {step} the synchronised weights differ between the sites: {differing_tensor} is not the same on "
            "all of them.",
            cause="code that changes weights on some sites only, or damaged messages",
            hint="--update sync, which reports the tensor and the ranks",
        )
    mismatch = find_replica_mismatch(setup)
    if mismatch is None:
        return
    is_average = mismatch.name.startswith(_AVERAGE)
    raise DesyncError(
        f"at step {step} the replicas are no longer equal: {mismatch}.",
        cause="an ema= that depends on the rank"
        if is_average
        else "code that changes weights on some ranks only, or an optimizer whose options or random "
        "numbers depend on the rank",
        hint="ema=the same number on every rank"
        if is_average
        else "look for `if rank == 0:` around anything that writes to the model",
    )


def find_replica_mismatch(setup: TrainingSetup) -> ReplicaMismatch | None:
    """Return the first tensor that differs between the ranks that hold it, or None. Every rank must call this.

    All ranks get the same result.
    """
    world, ema = setup.site, setup.update.ema
    if world.world_size == 1:
        return None
    weights = setup.weights
    named_tensors = [
        (name, local_tensor.tensor)
        for name, local_tensor in weights.local_tensors.items()
        if name in weights.parameter_names
    ]
    if ema is not None:
        averages = dict(zip(ema.names, ema.averages, strict=True))
        named_tensors += [(f"{_AVERAGE}{name}", averages.get(name)) for name, _ in named_tensors]
    checksums = torch.stack(
        [bits_checksum(tensor) if tensor is not None else _NO_CHECKSUM for _, tensor in named_tensors]
    )
    if not weights.is_unsharded:
        return _find_shard_mismatch(setup, [name for name, _ in named_tensors], checksums)
    highest, lowest = checksums.clone(), checksums.clone()
    world.all_reduce(highest, op="max")
    world.all_reduce(lowest, op="min")
    differing = torch.nonzero(highest != lowest).reshape(-1).tolist()
    if not differing:
        return None
    values = world.gather_json(int(checksums[differing[0]]))
    differing_ranks = [rank for rank, value in enumerate(values) if value != values[0]]
    return ReplicaMismatch(
        name=named_tensors[differing[0]][0],
        ranks=differing_ranks,
        num_differing=len(differing),
        num_tensors=len(named_tensors),
    )


def _find_shard_mismatch(setup: TrainingSetup, names: list[str], checksums: Tensor) -> ReplicaMismatch | None:
    """Compare shards: ranks that hold the same region of a tensor must hold the same values."""
    checksums_by_rank = setup.site.gather_json(checksums.tolist())
    mismatches: list[tuple[str, list[int]]] = []
    for index, name in enumerate(names):
        first_checksums: dict[object, int] = {}
        differing_ranks = []
        for rank, spec in enumerate(setup.weights.shard_specs(name.removeprefix(_AVERAGE))):
            value = checksums_by_rank[rank][index]
            if spec.boxes and first_checksums.setdefault(spec.boxes, value) != value:
                differing_ranks.append(rank)
        if differing_ranks:
            mismatches.append((name, differing_ranks))
    return (
        ReplicaMismatch(
            name=mismatches[0][0], ranks=mismatches[0][1], num_differing=len(mismatches), num_tensors=len(names)
        )
        if mismatches
        else None
    )


def averaged_names(names: list[str]) -> list[str]:
    """Return the names that this check gives to the averages (EMA) of these parameters."""
    return [f"{_AVERAGE}{name}" for name in names]
