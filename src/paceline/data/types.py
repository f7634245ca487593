"""The types that a loader yields, and the settings that divide global batches."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from paceline.data.order.batches import Batch

_USAGE_HINT = (
    "run.step(batch) does forward, loss, backward and update; the tensors are in [micro.data for micro in batch.micro]"
)


@dataclass(frozen=True, kw_only=True)
class BatchPartition:
    """The division of global batches into microbatches, and of the microbatches among replicas.

    If `reads_samples` is False, this process plans the batches, and other processes read their samples.
    """

    global_batch_size: int
    micro_batch_size: int
    replica: int = 0
    replicas: int = 1
    drop_last: bool = False
    reads_samples: bool = True


@dataclass(frozen=True, kw_only=True)
class ReplicaMicrobatch:
    """A microbatch of this replica: its collated `data`, and its position `index` in the global batch.

    `indices` are the indices of its samples; for a stream, their positions in the epoch.
    """

    index: int
    num_samples: int
    data: Any = field(repr=False)
    indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DatasetSummary:
    """A summary of a map-style dataset at the start of an epoch: its length, and a checksum of some samples."""

    num_samples: int
    samples: tuple[int, ...] = ()
    checksum: int = 0


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """This replica's part of one global batch."""

    batch: Batch
    micro: tuple[ReplicaMicrobatch, ...]
    """The microbatches of this replica; there may be none."""
    fingerprint: int = 0
    """For a stream, a checksum that must be equal on all replicas."""
    notes: tuple[str, ...] = ()
    """For a stream, lines for the log."""
    read_stand_in: Callable[[], Any] | None = field(default=None, repr=False)
    """A function that reads the data of another replica's microbatch, for a replica without one."""
    summary: DatasetSummary | None = None
    """A description of the dataset in the batch's epoch."""
    num_micro: int = field(init=False, repr=False, compare=False)
    """The number of microbatches of all replicas."""
    num_samples: int = field(init=False, repr=False, compare=False)
    """The number of samples of all replicas."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_micro", len(self.batch.micro))
        object.__setattr__(self, "num_samples", self.batch.num_samples)

    def __iter__(self) -> NoReturn:
        """Raise an error if the batch is unpacked like a DataLoader's.

        Raises:
            TypeError: always; the message shows the correct code.
        """
        raise TypeError(f"a batch of run.batches() can't be unpacked: {_USAGE_HINT}")

    def __getitem__(self, key: object) -> NoReturn:
        """Raise an error if the batch is indexed like a DataLoader's.

        Raises:
            TypeError: always; the message shows the correct code.
        """
        raise TypeError(f"a batch of run.batches() has no [{key!r}]: {_USAGE_HINT}")

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an error if code reads an attribute that a DataLoader's batch would have.

        Raises:
            AttributeError: always; the message shows the correct code.
        """
        raise AttributeError(f"a batch of run.batches() has no {name!r}: {_USAGE_HINT}")
