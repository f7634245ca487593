"""The input of a step: this replica's microbatches of one global batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


class Micro(Protocol):
    """A microbatch of this replica; `index` is its position in the global batch."""

    @property
    def index(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def data(self) -> Any: ...


class StepBatch(Protocol):
    """This replica's share of one step; `micro` may be empty."""

    @property
    def micro(self) -> Sequence[Micro]: ...
    @property
    def num_micro(self) -> int: ...
    @property
    def num_samples(self) -> int: ...
    @property
    def fingerprint(self) -> int: ...
    @property
    def spare(self) -> Callable[[], Any] | None: ...


@dataclass(frozen=True, kw_only=True)
class ReplicaShare:
    """A replica's part of the batch that a process received for all of its replicas."""

    micro: Sequence[Micro] = field(repr=False)
    num_micro: int
    num_samples: int
    fingerprint: int
    spare: Callable[[], Any] | None = None


def split_over_replicas(given: StepBatch, *, replica: int, replicas: int) -> ReplicaShare:
    """Return the microbatches of one replica, assigned round robin as between processes."""
    return ReplicaShare(
        micro=[micro for micro in given.micro if micro.index % replicas == replica],
        num_micro=given.num_micro,
        num_samples=given.num_samples,
        fingerprint=given.fingerprint,
    )
