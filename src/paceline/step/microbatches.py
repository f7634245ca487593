"""The input of a step: this replica's microbatches of one global batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class StepMicrobatch(Protocol):
    """A microbatch of this replica; `index` is its position in the global batch."""

    @property
    def index(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def data(self) -> Any: ...


class StepBatch(Protocol):
    """One replica's part of a global batch. `micro` has the replica's microbatches; it may be empty.

    `num_micro` and `num_samples` are the numbers of microbatches and samples in the global batch. `fingerprint` is
    equal on all ranks if they read the same stream. `read_stand_in()` reads a microbatch of another replica; it is
    None if that is not possible.
    """

    @property
    def micro(self) -> Sequence[StepMicrobatch]: ...
    @property
    def num_micro(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def fingerprint(self) -> int: ...
    @property
    def read_stand_in(self) -> Callable[[], Any] | None: ...


@dataclass(frozen=True, kw_only=True)
class ReplicaBatch:
    """One replica's part of a global batch, in a process that runs several replicas."""

    micro: Sequence[StepMicrobatch] = field(repr=False)
    num_micro: int
    num_samples: int
    fingerprint: int
    read_stand_in: Callable[[], Any] | None = None


def select_replica_batch(step_batch: StepBatch, *, replica: int, num_replicas: int) -> ReplicaBatch:
    """Return one replica's part of this process's batch. Replicas get the microbatches round robin."""
    return ReplicaBatch(
        micro=[micro for micro in step_batch.micro if micro.index % num_replicas == replica],
        num_micro=step_batch.num_micro,
        num_samples=step_batch.num_samples,
        fingerprint=step_batch.fingerprint,
    )
