"""Leases of a parameter server: which worker computes which share of a batch, and on which weight version.

A *version* is the number of updates applied so far. A gradient that was computed on version v and is applied after u
updates has the staleness u - v. The bound holds for every gradient, so it is checked before a share is leased, and not
only when its gradient arrives: with n gradients in flight, the one that is applied last has a staleness of at least
n - 1. A share that is computed on version v has a deadline, the update number v + bound. A share is leased only if this
share and all shares in flight can be applied by their deadlines, one after another. An update is applied only if all
other shares in flight can be applied by their deadlines afterwards. This is the feasibility test for scheduling jobs of
length one with deadlines (Jackson's rule, earliest deadline first).
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchShare:
    """A share of a batch: share `number` of the `num_shares` shares of step `step`, which counts from 0."""

    step: int
    number: int
    num_shares: int


@dataclass(kw_only=True, eq=False)
class Lease:
    """A share that a worker computes, and the version of the weights that it uses."""

    number: int
    share: BatchShare
    worker: int
    version: int
    is_pushed: bool = False


class Leases:
    """The shares that are free, in flight, and applied.

    With a staleness bound of 0 the shares of a batch are one update; with a larger bound each share is one update.
    """

    def __init__(self, *, bound: float) -> None:
        self.version = 0
        self.staleness_counts: dict[int, Counter[int]] = {}
        self._bound = bound
        self._free_shares: deque[BatchShare] = deque()
        self._in_flight: list[Lease] = []
        self._pushed: list[Lease] = []
        self._num_leases = 0

    @property
    def sums_shares(self) -> bool:
        """Return whether all shares of a batch are one update."""
        return self._bound == 0

    @property
    def num_free(self) -> int:
        """The number of shares that are not leased."""
        return len(self._free_shares)

    @property
    def num_in_flight(self) -> int:
        """The number of shares that are leased and not applied yet."""
        return len(self._in_flight)

    @property
    def oldest_number(self) -> int:
        """The number of the oldest lease that is not applied yet, or of the next lease if there is none."""
        return min((lease.number for lease in self._in_flight), default=self._num_leases + 1)

    def add_shares(self, shares: Iterable[BatchShare]) -> None:
        """Add a batch's shares to the free shares."""
        self._free_shares += shares

    def lease_next(self, worker: int) -> Lease | None:
        """Return a lease on the oldest free share, or None if no share is free or the bound forbids another lease."""
        if not self._free_shares or not self._can_lease(self._free_shares[0]):
            return None
        self._num_leases += 1
        lease = Lease(number=self._num_leases, share=self._free_shares.popleft(), worker=worker, version=self.version)
        self._in_flight.append(lease)
        return lease

    def record_push(self, lease: Lease) -> None:
        """Record that the complete gradient of a lease has arrived."""
        assert lease in self._in_flight and not lease.is_pushed
        lease.is_pushed = True
        self._pushed.append(lease)

    def release_worker(self, worker: int) -> list[BatchShare]:
        """Free the shares that a lost worker had not pushed, and return them. Free shares stay sorted, oldest first."""
        lost = [lease for lease in self._in_flight if lease.worker == worker and not lease.is_pushed]
        self._in_flight = [lease for lease in self._in_flight if lease not in lost]
        freed = sorted((lease.share for lease in lost), key=lambda share: (share.step, share.number))
        self._free_shares = deque(sorted([*freed, *self._free_shares], key=lambda share: (share.step, share.number)))
        return freed

    def ready_leases(self) -> Sequence[Lease]:
        """Return the leases of the next update in the order of summation; empty if no update may be applied now."""
        if self.sums_shares:
            return self._ready_batch()
        for lease in self._pushed:
            if self._is_feasible([other for other in self._in_flight if other is not lease], version=self.version + 1):
                return (lease,)
        return ()

    def record_update(self, leases: Sequence[Lease], *, is_applied: bool = True) -> None:
        """Record the update of these leases. If `is_applied` is False, the update was skipped: the version stays."""
        for lease in leases:
            self._in_flight.remove(lease)
            self._pushed.remove(lease)
            if is_applied:
                self.staleness_counts.setdefault(lease.worker, Counter())[self.version - lease.version] += 1
        self.version += int(is_applied)

    def _ready_batch(self) -> Sequence[Lease]:
        if not self._pushed:
            return ()
        first_step = min(lease.share.step for lease in self._pushed)
        pushed = [lease for lease in self._pushed if lease.share.step == first_step]
        return sorted(pushed, key=lambda lease: lease.share.number) if len(pushed) == pushed[0].share.num_shares else ()

    def _can_lease(self, share: BatchShare) -> bool:
        if self.sums_shares:
            return all(lease.share.step == share.step for lease in self._in_flight)
        return self._is_feasible(self._in_flight, version=self.version, num_new=1)

    def _is_feasible(self, leases: Sequence[Lease], *, version: int, num_new: int = 0) -> bool:
        """Return whether these leases, and `num_new` new ones of `version`, can all be applied within the bound."""
        if math.isinf(self._bound):
            return True
        versions = [*sorted(lease.version for lease in leases), *[version] * num_new]
        return all(version + position - leased <= self._bound for position, leased in enumerate(versions))
