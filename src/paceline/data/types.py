"""What a feed gives and how it is cut."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from paceline.data.order.batches import Batch

_INSTEAD = (
    "run.step(batch) does forward, loss, backward and update; the tensors are in [micro.data for micro in batch.micro]"
)


@dataclass(frozen=True, kw_only=True)
class BatchPartition:
    """How global batches are cut and dealt. Where others read the samples (`reads` is False), nothing is dealt here."""

    global_batch_size: int
    micro_batch_size: int
    replica: int = 0
    replicas: int = 1
    drop_last: bool = False
    reads: bool = True


@dataclass(frozen=True, kw_only=True)
class LocalMicro:
    """One microbatch of this replica: collated `data`, its place `index` in the global batch, its samples."""

    index: int
    num_samples: int
    data: Any = field(repr=False)
    indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """What is seen of indexed data as an epoch begins: how long it is, and one checksum of some of its samples."""

    num_samples: int
    samples: tuple[int, ...] = ()
    checksum: int = 0


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """This replica's share of one global batch; `micro` may be empty. `spare` reads a microbatch of another's.

    `sight` is of the batch's epoch.
    """

    batch: Batch
    micro: tuple[LocalMicro, ...]
    fingerprint: int = 0
    notes: tuple[str, ...] = ()
    spare: Callable[[], Any] | None = field(default=None, repr=False)
    sight: DatasetSummary | None = None

    def __iter__(self) -> NoReturn:
        """Refuse to be unpacked as what a DataLoader gives is.

        Raises:
            TypeError: always, with what to write.
        """
        raise TypeError(f"a batch of run.batches() can't be unpacked: {_INSTEAD}")

    def __getitem__(self, place: object) -> NoReturn:
        """Refuse to be indexed as what a DataLoader gives is.

        Raises:
            TypeError: always, with what to write.
        """
        raise TypeError(f"a batch of run.batches() has no [{place!r}]: {_INSTEAD}")

    def __getattr__(self, name: str) -> NoReturn:
        """Say what to write in place of an attribute that tensors have.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(f"a batch of run.batches() has no {name!r}: {_INSTEAD}")

    @property
    def num_micro(self) -> int:
        """Microbatches over all replicas."""
        return len(self.batch.micro)

    @property
    def num_samples(self) -> int:
        """Samples over all replicas."""
        return self.batch.num_samples
