"""The layout's observed step, and the check that it read the same data as one process."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from paceline.data.stream.iterable_loader import checksum
from paceline.verification.diagnosis.difference_location import of_owners
from paceline.verification.diagnosis.gradient_cause import data_cause
from paceline.verification.diagnosis.rank_names import RankNames
from paceline.verification.diagnosis.rerun import Tensors
from paceline.verification.reference.reference import Micro
from paceline.verification.reference.sample_reader import num_rows


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    """The layout's observed step: gradients and buffers of each copy, and the data that was read, by microbatch.

    The microbatches are dealt to `replicas`; each has its own copy, unless sharding makes copies fewer.
    """

    gradients: Sequence[Tensors]
    buffers: Sequence[Tensors]
    losses: Sequence[float] = ()
    samples: Mapping[int, Sequence[int]] = field(default_factory=dict)
    contents: Mapping[int, int] = field(default_factory=dict)
    rows: Mapping[int, int] = field(default_factory=dict)
    ran: Sequence[int] = ()
    replicas: int = 0

    @property
    def dealt(self) -> int:
        """The number of replicas that the microbatches are dealt to."""
        return self.replicas or len(self.gradients)


def read_otherwise(seen: ObservedStep, *, pieces: Sequence[Micro], places: RankNames | None) -> str | None:
    """Return what is wrong with the data that the replicas read; None if nothing is."""
    if not seen.samples:
        return None
    wanted = {index: list(piece.samples) for index, piece in enumerate(pieces)}
    twice = sorted({index for index in seen.ran if seen.ran.count(index) > 1})
    if twice:
        never = sorted(set(wanted) - set(seen.ran))
        return f"data order: several ranks ran the same microbatches ({twice[:4]}), and none ran {never[:4]}"
    cause = data_cause(seen.samples, wanted)
    if cause is not None:
        wrong = [index for index, samples in wanted.items() if list(seen.samples.get(index, ())) != samples]
        return cause + of_owners(wrong, replicas=seen.dealt, places=places)
    other = [i for i, piece in enumerate(pieces) if seen.contents.get(i) not in (None, checksum(piece.data, 0))]
    if not other:
        return None
    some = of_owners(other, replicas=seen.dealt, places=places)
    share = f"{len(other)} of {len(wanted)}{some}"
    there = f"data: the right samples with different contents in microbatch {other[0]} ({share})"
    rows, samples = seen.rows.get(other[0], 0), len(wanted[other[0]])
    if rows and rows != num_rows(pieces[other[0]].data):
        return f"{there}: the collation returns {rows} rows for {samples} samples"
    asks = "a dataset or collation that depends on the rank or ignores the index, or " if some else ""
    random = "random augmentation or collation that is not keyed to the sample"
    return f"{there}: {asks}{random}, or a dataset that depends on the data worker"
