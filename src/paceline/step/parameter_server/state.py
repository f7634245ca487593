"""Where a server's loop and its workers meet: one lock around the books and the weights.

Updates are taken by the loop's own thread: what goes wrong with one is an exception there, as in any other step.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.data.order.leases import BatchShare, Lease, Leases
from paceline.errors import DesyncError, RunError
from paceline.step.parameter_server.flat_buffers import flat_of
from paceline.step.parameter_server.gradients import GradientPush

_PATIENCE = 0.25  # of the time after which the other end would give up


@dataclass(frozen=True, kw_only=True)
class ServedWeights:
    """What workers are given: with each lease the parameters that this server has, by name; once what nothing updates.

    `model` tells models of other shapes apart.
    """

    names: Sequence[str]
    weights: Sequence[Tensor] = field(repr=False)
    rest: Sequence[Tensor] = field(repr=False)
    model: str


class ServerState:
    """The shared side; its attributes are read and written with `lock` held."""

    def __init__(self, *, leases: Leases, held: ServedWeights, timeout_seconds: float) -> None:
        self.lock = threading.Condition()
        self.leases = leases
        self.held = held
        self.timeout_seconds = timeout_seconds
        self.version = 0
        self.pushes: dict[int, GradientPush] = {}
        self.where: dict[int, Mapping[str, Any]] = {}
        self.names: dict[int, str] = {}
        self.notes: list[str] = []
        self.failure: Exception | None = None
        self.has_begun = False
        self.is_over = False
        self.alone_since = time.monotonic()
        self._flat = flat_of(held.weights)
        self._shared = self._flat.row() if leases.joins else None
        self._shared_at: int | None = None
        self._here: set[int] = set()
        self._orders: dict[int, str] = {}

    @property
    def patience(self) -> float:
        """Seconds after which an end that waits should be told that this one lives."""
        return self.timeout_seconds * _PATIENCE

    @property
    def num_workers(self) -> int:
        """How many are here."""
        return len(self._here)

    def row(self) -> Tensor:
        """Room for the weights. Where a batch is one update, one for all: its shares have the same weights, and none is
        under way when the next one's are packed."""
        return self._flat.row() if self._shared is None else self._shared

    def offer(self, step: int, where: Mapping[str, Any], shares: Iterable[BatchShare]) -> None:
        """A batch's shares may be given away; `where` its samples are. Weights may have been changed by hand before."""
        with self.lock:
            self.has_begun = True
            self.where[step] = where
            self._shared_at = None
            self.leases.offer(shares)
            self.lock.notify_all()

    def begins(self) -> bool:
        """Wait a while for the first batch: until then what is loaded may be changed by hand."""
        with self.lock:
            return self.lock.wait_for(lambda: self.has_begun or self.is_over, timeout=self.patience)

    def end(self) -> None:
        """It is over: whoever waits is told."""
        with self.lock:
            self.is_over = True
            self.lock.notify_all()

    def fail(self, error: Exception) -> None:
        """The loop raises it."""
        with self.lock:
            self.failure = error
            self.lock.notify_all()

    def come(self, worker: int, *, rank: int, life: int, model: str) -> None:
        """A worker is here.

        Raises:
            DesyncError: it has built another model.
        """
        with self.lock:
            if model != self.held.model:
                raise DesyncError(
                    f"the worker of rank {rank} has built another model than the server.",
                    cause="code that builds, ties or freezes layers on some ranks only",
                    hint="the same model on every rank",
                )
            self._here.add(worker)
            self.names[worker] = f"worker {rank}"
            if life > 1:
                self.notes.append(f"rank {rank} is back, a worker as before")
            self.lock.notify_all()

    def go(self, worker: int, *, why: str) -> None:
        """A worker is not here any more: what it had not pushed whole is anybody's."""
        with self.lock:
            if worker not in self._here:
                return
            self._here.discard(worker)
            self.alone_since = time.monotonic()
            back = self.leases.lose(worker)
            if not self.is_over:
                lost = ", ".join(f"step {share.step + 1}'s part {share.number + 1} of {share.of}" for share in back)
                given = (
                    f"its unpushed gradient is lost, and {lost} goes to the next who asks" if back else "it had none"
                )
                self.notes.append(f"lost {self.names[worker]}, {why}: {given}")
            self.lock.notify_all()

    def lease(self, worker: int, *, row: Tensor) -> tuple[Lease, Mapping[str, Any]] | None:
        """A share for this worker, and in `row` the weights for it; None if none came up for a while, or it is over."""
        found: list[Lease] = []

        def granted() -> bool:
            lease = None if self.is_over else self.leases.grant(worker)
            found.extend([] if lease is None else [lease])
            return self.is_over or lease is not None

        with self.lock:
            self.lock.wait_for(granted, timeout=self.patience)
            if not found:
                return None
            self._pack(row)
            self.lock.notify_all()
            return found[0], self.where[found[0].share.step]

    def _pack(self, row: Tensor) -> None:
        if row is self._shared and self._shared_at == self.version:
            return
        self._flat.packed(self.held.weights, into=row)
        self._shared_at = self.version if row is self._shared else None

    def push(self, lease: Lease, push: GradientPush) -> None:
        """A share's gradient, whole."""
        with self.lock:
            self.leases.push(lease)
            self.pushes[lease.number] = push
            self.lock.notify_all()

    def same_order(self, epoch: int, name: str, what: str) -> None:
        """Workers read the samples: an order of the user's own must be the same on all.

        Raises:
            DesyncError
        """
        with self.lock:
            if self._orders.setdefault(epoch, name) != name:
                raise DesyncError(
                    f"{what} gave workers different orders of the samples, in epoch {epoch}.",
                    cause="it draws from a generator of its own, or depends on the process",
                    hint="order=lambda num_samples, epoch, seed: a pure function of these",
                )

    def weights_at(self, version: int, *, row: Tensor) -> int:
        """In `row` the weights after at least so many updates, if they come about in time; after how many."""
        with self.lock:
            self.lock.wait_for(lambda: self.is_over or self.version >= version, timeout=self.timeout_seconds)
            self._pack(row)
            return self.version

    def stage(self, number: int, push: GradientPush) -> None:
        """This server's part of a gradient, which counts once the first server has its own."""
        with self.lock:
            self.pushes[number] = push
            self.lock.notify_all()

    def waits(self, until: Callable[[], bool]) -> None:
        """With the lock held: until that is so.

        Raises:
            RunError: it is not, for as long as one waits for anybody.
        """
        if not self.lock.wait_for(lambda: until() or self.failure is not None, timeout=self.timeout_seconds):
            raise RunError(f"a gradient that the first server has did not come within {self.timeout_seconds:g} s.")
