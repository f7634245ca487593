"""A step as the layout ran it, and a check that the layout read the same data as one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.data.stream.iterable_loader import checksum
from paceline.verification.diagnosis.difference_location import describe_owners
from paceline.verification.diagnosis.gradient_cause import data_cause
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.reference.reference import ReferenceMicrobatch
from paceline.verification.reference.reference_step import Tensors
from paceline.verification.reference.sample_reader import num_rows


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    """The gradients and buffers of each copy of the model, the loss on each rank, and the data that was read."""

    gradients: Sequence[Tensors]
    buffers: Sequence[Tensors]
    losses: Sequence[float] = ()
    samples: Mapping[int, Sequence[int]] = field(default_factory=dict)
    """The indices of the samples, by microbatch."""
    contents: Mapping[int, int] = field(default_factory=dict)
    """A checksum of the data, by microbatch."""
    row_counts: Mapping[int, int] = field(default_factory=dict)
    """The number of rows, by microbatch."""
    executed_microbatches: Sequence[int] = ()
    """The index of every microbatch that any replica ran."""
    replicas: int = 0
    """The number of replicas. Several replicas may share a sharded copy of the model."""

    @property
    def num_replicas(self) -> int:
        """The number of replicas that the microbatches are distributed over."""
        return self.replicas or len(self.gradients)


def find_data_difference(
    observed: ObservedStep, *, microbatches: Sequence[ReferenceMicrobatch], rank_names: RankNames | None
) -> str | None:
    """Return the fault in the data that the replicas read; None if the data is right."""
    if not observed.samples:
        return None
    expected = {index: list(micro.samples) for index, micro in enumerate(microbatches)}
    repeated = sorted(
        {index for index in observed.executed_microbatches if observed.executed_microbatches.count(index) > 1}
    )
    if repeated:
        missing = sorted(set(expected) - set(observed.executed_microbatches))
        return f"data order: several ranks ran the same microbatches ({repeated[:4]}), and none ran {missing[:4]}"
    cause = data_cause(observed.samples, expected)
    if cause is not None:
        wrong = [index for index, samples in expected.items() if list(observed.samples.get(index, ())) != samples]
        return cause + describe_owners(wrong, replicas=observed.num_replicas, rank_names=rank_names)
    differing = [
        i for i, micro in enumerate(microbatches) if observed.contents.get(i) not in (None, checksum(micro.data, 0))
    ]
    if not differing:
        return None
    ranks_text = describe_owners(differing, replicas=observed.num_replicas, rank_names=rank_names)
    share = f"{len(differing)} of {len(expected)}{ranks_text}"
    prefix = f"data: the right samples with different contents in microbatch {differing[0]} ({share})"
    rows, samples = observed.row_counts.get(differing[0], 0), len(expected[differing[0]])
    if rows and rows != num_rows(microbatches[differing[0]].data):
        return f"{prefix}: the collation returns {rows} rows for {samples} samples"
    rank_cause = "a dataset or collation that depends on the rank or ignores the index, or " if ranks_text else ""
    random_cause = "random augmentation or collation that is not keyed to the sample"
    return f"{prefix}: {rank_cause}{random_cause}, or a dataset that depends on the data worker"
