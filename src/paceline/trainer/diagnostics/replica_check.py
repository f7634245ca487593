"""A cheap check that the replicas are equal, made every `train.check_every` steps. It names the first difference."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from typing_extensions import override

from paceline.config.task import PreviousFailure
from paceline.errors import DesyncError
from paceline.events import Note
from paceline.parallel.module_access.tensor_access import bits_checksum
from paceline.trainer.diagnostics.differing_copies import DifferingCopies, name_wrong_copy, read_differing_copies
from paceline.trainer.saving.local_sgd_state import get_site_synchronizer
from paceline.trainer.setup.build_training_setup import TrainingSetup

_AVERAGE = "the average (ema) of "
_NO_CHECKSUM = torch.zeros((), dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class ReplicaMismatch:
    """The first tensor that differs between ranks.

    `ranks` are the ranks whose copy of the tensor differs from that of most ranks. If there is no majority, they are
    the ranks whose copy differs from the one on the lowest rank. If the tensor is sharded, ranks with the same shard
    are compared. In total, `num_differing` of `num_tensors` tensors differ.
    """

    name: str
    ranks: list[int]
    has_majority: bool
    num_differing: int
    num_tensors: int

    @override
    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.ranks))
        others = "the copy on most ranks" if self.has_majority else "the copy on the lowest rank"
        return (
            f"{self.name} differs on rank {ranks} from {others} "
            f"({self.num_differing} of {self.num_tensors} tensors differ)"
        )


class ReplicaChecks:
    """The comparisons of the replicas: after the first step, every `train.check_every` steps, and at each save.

    If a difference was the `previous_failure`, its step is compared again, to find the rank that was wrong.
    """

    def __init__(self, setup: TrainingSetup, *, start_step: int, previous_failure: PreviousFailure | None) -> None:
        self._setup = setup
        self._interval = setup.settings.train.check_every
        self._first_step = start_step + 1
        self._last_checked_step = start_step
        copies = None if previous_failure is None else previous_failure.copies
        self._differing_copies = DifferingCopies.from_json(copies)

    def next_step(self, step: int) -> float:
        """Return the next step after `step` at which the replicas are to be compared, even if it is not saved."""
        steps: list[float] = [self._first_step, math.inf]
        if self._differing_copies is not None:
            steps.append(self._differing_copies.step)
        if self._interval:
            steps.append((step // self._interval + 1) * self._interval)
        return min(due for due in steps if due > step)

    def check(self, step: int) -> list[Note]:
        """Compare the replicas, unless this step was already compared or `train.check_every` is 0.

        If a difference in this step ended the attempt before, return a note that names the rank whose copy was wrong.
        The steps in flight are completed. Every rank must call this.

        Raises:
            DesyncError: the replicas differ.
        """
        if self._interval and self._last_checked_step != step:
            self._setup.step.finish_pending()
            check_replicas(self._setup, step=step)
            self._last_checked_step = step
        copies = self._differing_copies
        if copies is None or copies.step != step:
            return []
        self._differing_copies = None
        return [Note(text=text, level="warning") for text in filter(None, [name_wrong_copy(self._setup, copies)])]


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
    copies = None if is_average else read_differing_copies(setup, mismatch.name, step=step)
    error = DesyncError(
        f"at step {step} the replicas are no longer equal: {mismatch}.",
        cause="an ema= that depends on the rank"
        if is_average
        else "code that changes weights on some ranks only, an optimizer whose options or random "
        "numbers depend on the rank, or a memory error of the machine",
        hint="ema=the same number on every rank"
        if is_average
        else "look for `if rank == 0:` around anything that writes to the model",
    )
    is_whole_run = setup.site.world_size == setup.world.world_size  # with several sites, their ranks are numbered apart
    error.ranks = tuple(mismatch.ranks) if mismatch.has_majority and is_whole_run else ()
    error.copies = asdict(copies) if copies is not None and is_whole_run else None
    raise error


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
    highest, highest_inverse = world.all_reduce(torch.stack([checksums, ~checksums]), op="max")
    differing = torch.nonzero(highest != ~highest_inverse).reshape(-1).tolist()
    if not differing:
        return None
    values = world.gather_json(int(checksums[differing[0]]))
    odd_ranks, has_majority = find_odd_ranks(dict(enumerate(values)))
    return ReplicaMismatch(
        name=named_tensors[differing[0]][0],
        ranks=odd_ranks,
        has_majority=has_majority,
        num_differing=len(differing),
        num_tensors=len(named_tensors),
    )


def _find_shard_mismatch(setup: TrainingSetup, names: list[str], checksums: Tensor) -> ReplicaMismatch | None:
    """Compare shards: ranks that hold the same region of a tensor must hold the same values."""
    checksums_by_rank = setup.site.gather_json(checksums.tolist())
    mismatches: list[tuple[str, list[int], bool]] = []
    for index, name in enumerate(names):
        checksums_by_shard: dict[object, dict[int, int]] = {}
        for rank, spec in enumerate(setup.weights.shard_specs(name.removeprefix(_AVERAGE))):
            if spec.boxes:
                checksums_by_shard.setdefault(spec.boxes, {})[rank] = checksums_by_rank[rank][index]
        found = [find_odd_ranks(copies) for copies in checksums_by_shard.values() if len(set(copies.values())) > 1]
        if found:
            odd_ranks = sorted(rank for ranks, _ in found for rank in ranks)
            mismatches.append((name, odd_ranks, all(has_majority for _, has_majority in found)))
    if not mismatches:
        return None
    name, ranks, has_majority = mismatches[0]
    return ReplicaMismatch(
        name=name, ranks=ranks, has_majority=has_majority, num_differing=len(mismatches), num_tensors=len(names)
    )


def find_odd_ranks(checksums: Mapping[int, int]) -> tuple[list[int], bool]:
    """Return the ranks whose checksum differs from that of most ranks, and whether most ranks have the same one.

    Without a majority, return the ranks whose checksum differs from that of the lowest rank.
    """
    [(most_common, count)] = Counter(checksums.values()).most_common(1)
    has_majority = 2 * count > len(checksums)
    expected = most_common if has_majority else checksums[min(checksums)]
    return [rank for rank, value in checksums.items() if value != expected], has_majority


def averaged_names(names: list[str]) -> list[str]:
    """Return the names that this check gives to the averages (EMA) of these parameters."""
    return [f"{_AVERAGE}{name}" for name in names]
