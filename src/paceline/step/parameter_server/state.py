"""The state that a server's main loop shares with its worker threads: one lock for leases, pushes and weights.

The main loop's thread applies the updates, so an error in an update is raised there, as in any other step.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.console.formatting import plural
from paceline.data.order.leases import BatchShare, Lease, Leases
from paceline.data.order.microbatch_assignment import assign_microbatches
from paceline.errors import DesyncError, RunError
from paceline.launch.several_nodes.lost_nodes import LostNode, LostWork
from paceline.step.parameter_server.flat_buffers import layout_of
from paceline.step.parameter_server.push_messages import GradientPush
from paceline.step.parameter_server.transport import ConnectionLost

_PATIENCE = 0.25  # as a fraction of the worker's timeout
_LOSS_SECONDS = 10.0  # from the first end of a lost node's workers to the head's notice of it


@dataclass(frozen=True, kw_only=True)
class ServedWeights:
    """The tensors that workers receive: `weights` with each lease, and `fixed` once, at the start.

    `weights` are the parameters that this server owns, and `names` their names. `fixed` are the frozen parameters and
    the buffers, which no update changes. `digest` identifies the model.
    """

    names: Sequence[str]
    weights: Sequence[Tensor] = field(repr=False)
    fixed: Sequence[Tensor] = field(repr=False)
    digest: str


class ServerState:
    """The state shared between threads. A thread changes the attributes only while it holds `lock`.

    `version` is the number of applied updates. `pushes` has the pushes that wait for their update, by lease number.
    `locations` has the location of each open batch's samples, by step, and `micro_sizes` the number of samples of each
    of its microbatches.
    """

    def __init__(self, *, leases: Leases, served: ServedWeights, timeout_seconds: float) -> None:
        self.lock = threading.Condition()
        self.leases = leases
        self.served = served
        self.timeout_seconds = timeout_seconds
        self.version = 0
        self.pushes: dict[int, GradientPush] = {}
        self.locations: dict[int, Mapping[str, Any]] = {}
        self.micro_sizes: dict[int, Sequence[int]] = {}
        self.worker_names: dict[int, str] = {}
        self.notes: list[str] = []
        self.failure: Exception | None = None
        self.has_started = False
        self.is_over = False
        self.last_disconnect_time = time.monotonic()
        self._layout = layout_of(served.weights)
        self._shared_buffer = self._layout.empty_buffer() if leases.sums_shares else None
        self._shared_version: int | None = None
        self._connected_workers: dict[int, int] = {}  # the rank of each
        self._replaced_workers: set[int] = set()
        self._lost_work: dict[int, tuple[float, LostWork]] = {}  # of the last lost worker of each rank, and when
        self._order_by_epoch: dict[int, str] = {}

    @property
    def patience(self) -> float:
        """The time in seconds after which a waiting worker gets a message that this server is alive."""
        return self.timeout_seconds * _PATIENCE

    @property
    def num_workers(self) -> int:
        """The number of connected workers."""
        return len(self._connected_workers)

    def weights_buffer(self) -> Tensor:
        """Return a buffer for the weights.

        If a batch is one update, all workers share one buffer: all shares of a batch have the same weights, and no
        share is in flight when the weights of the next batch are packed.
        """
        return self._layout.empty_buffer() if self._shared_buffer is None else self._shared_buffer

    def offer_shares(
        self, step: int, location: Mapping[str, Any], shares: Iterable[BatchShare], *, micro_sizes: Sequence[int] = ()
    ) -> None:
        """Offer a batch's shares. `location` says where the batch's samples are.

        The weights are packed again, because the main loop may have changed them since the last batch.
        """
        with self.lock:
            self.has_started = True
            self.locations[step], self.micro_sizes[step] = location, micro_sizes
            self._shared_version = None
            self.leases.add_shares(shares)
            self.lock.notify_all()

    def wait_for_first_batch(self) -> bool:
        """Wait up to `patience` seconds for the first batch, and return whether it was offered or the run is over.

        Until the first batch, the main loop may still change the weights.
        """
        with self.lock:
            return self.lock.wait_for(lambda: self.has_started or self.is_over, timeout=self.patience)

    def wait_for_end(self, seconds: float) -> bool:
        """Wait up to this many seconds for the end of the run, and return whether it is over."""
        with self.lock:
            return self.lock.wait_for(lambda: self.is_over, timeout=seconds)

    def end_run(self) -> None:
        """Mark the run as over and wake all waiting threads."""
        with self.lock:
            self.is_over = True
            self.lock.notify_all()

    def store_failure(self, error: Exception) -> None:
        """Store an error for the main loop to raise."""
        with self.lock:
            self.failure = error
            self.lock.notify_all()

    def add_worker(self, worker: int, *, rank: int, start_number: int, digest: str) -> None:
        """Register a worker. `start_number` counts the starts of its process, and `digest` identifies its model.

        An earlier worker of the same rank is lost, even if its connection has not ended: gloo may not notice for long
        that the process at the other end was killed.

        Raises:
            DesyncError: the worker has built another model.
        """
        with self.lock:
            if digest != self.served.digest:
                raise DesyncError(
                    f"the worker of rank {rank} has built a different model than the server.",
                    cause="code that builds, ties or freezes layers on some ranks only",
                    hint="build the same model on every rank",
                )
            for other in [other for other, other_rank in self._connected_workers.items() if other_rank == rank]:
                self._replaced_workers.add(other)
                self._remove_worker(other, reason="which was replaced")
            self._connected_workers[worker] = rank
            self.worker_names[worker] = f"worker {rank}"
            if start_number > 1:
                self.notes.append(f"the worker of rank {rank} has restarted")
            self.lock.notify_all()

    def remove_worker(self, worker: int, *, reason: str) -> None:
        """Remove a worker. The shares that were leased to it and not pushed completely become free again."""
        with self.lock:
            self._remove_worker(worker, reason=reason)

    def lose_node(self, node: LostNode) -> LostWork:
        """Remove the workers of a lost node, and return what they had not pushed.

        The server may have noticed before that their processes have ended.
        """
        ranks = range(node.first_rank, node.first_rank + node.num_ranks)
        with self.lock:
            for worker in [worker for worker, rank in self._connected_workers.items() if rank in ranks]:
                self._replaced_workers.add(worker)
                self._remove_worker(worker, reason="whose node is gone")
            since = time.monotonic() - node.silent_seconds - _LOSS_SECONDS
            works = [self._lost_work.pop(rank, (0.0, None)) for rank in ranks]
            lost = [work for lost_time, work in works if work is not None and lost_time >= since]
            work = LostWork(gradients=sum(one.gradients for one in lost), samples=sum(one.samples for one in lost))
            self.notes.append(
                f"{node.name} is lost after step {node.step}: {work.describe()}; "
                f"{plural(self.num_workers, 'worker')} left"
            )
            return work

    def complete_batch(self, step: int) -> None:
        """Forget where the samples of a batch are. The caller holds the lock."""
        del self.locations[step], self.micro_sizes[step]

    def _num_samples(self, share: BatchShare) -> int:
        sizes = self.micro_sizes[share.step]
        return sum(sizes[i] for i in assign_microbatches(len(sizes), replica=share.number, replicas=share.num_shares))

    def _remove_worker(self, worker: int, *, reason: str) -> None:
        if worker not in self._connected_workers:
            return
        rank = self._connected_workers.pop(worker)
        self.last_disconnect_time = time.monotonic()
        freed = self.leases.release_worker(worker)
        samples = sum(map(self._num_samples, freed))
        self._lost_work[rank] = time.monotonic(), LostWork(gradients=len(freed), samples=samples)
        if not self.is_over:
            lost_shares = ", ".join(
                f"share {share.number + 1} of {share.num_shares} of step {share.step + 1}" for share in freed
            )
            outcome = (
                f"its unpushed gradient is lost, and {lost_shares} goes to the next free worker"
                if freed
                else "it was not computing a share"
            )
            self.notes.append(f"lost {self.worker_names[worker]}, {reason}: {outcome}")
        self.lock.notify_all()

    def lease_share(self, worker: int, *, buffer: Tensor) -> tuple[Lease, Mapping[str, Any]] | None:
        """Lease a share to this worker, and pack the weights into `buffer`.

        Return the lease and the location of the batch's samples. Return None if no share became free within `patience`
        seconds or the run is over.

        Raises:
            ConnectionLost: another worker has replaced this one.
        """
        granted_leases: list[Lease] = []

        def try_grant() -> bool:
            is_refused = self.is_over or worker in self._replaced_workers
            lease = None if is_refused else self.leases.lease_next(worker)
            granted_leases.extend([] if lease is None else [lease])
            return is_refused or lease is not None

        with self.lock:
            self.lock.wait_for(try_grant, timeout=self.patience)
            self._refuse_replaced(worker)
            if not granted_leases:
                return None
            self._pack_weights(buffer)
            self.lock.notify_all()
            return granted_leases[0], self.locations[granted_leases[0].share.step]

    def _pack_weights(self, buffer: Tensor) -> None:
        if buffer is self._shared_buffer and self._shared_version == self.version:
            return
        self._layout.pack(self.served.weights, out=buffer)
        self._shared_version = self.version if buffer is self._shared_buffer else None

    def store_push(self, lease: Lease, push: GradientPush) -> None:
        """Store the push of a leased share on the first server, which decides when it is applied.

        Raises:
            ConnectionLost: another worker has replaced this one, so that its share is free again.
        """
        with self.lock:
            self._refuse_replaced(lease.worker)
            self.leases.record_push(lease)
            self.pushes[lease.number] = push
            self.lock.notify_all()

    def _refuse_replaced(self, worker: int) -> None:
        if worker in self._replaced_workers:
            raise ConnectionLost("another worker of this rank has connected")

    def check_order(self, epoch: int, checksum: str, source: str) -> None:
        """Check that all workers have the same order of samples. `source` names the code that computes the order.

        Raises:
            DesyncError
        """
        with self.lock:
            if self._order_by_epoch.setdefault(epoch, checksum) != checksum:
                raise DesyncError(
                    f"{source} gave workers different orders of the samples, in epoch {epoch}.",
                    cause="it draws from its own generator, or depends on the process",
                    hint="order=lambda num_samples, epoch, seed: a pure function of these",
                )

    def pack_version(self, version: int, *, buffer: Tensor) -> int:
        """Wait for `version` updates or a timeout, pack the newest weights into `buffer`, and return their version."""
        with self.lock:
            self.lock.wait_for(lambda: self.is_over or self.version >= version, timeout=self.timeout_seconds)
            self._pack_weights(buffer)
            return self.version

    def store_part(self, lease_number: int, push: GradientPush) -> None:
        """Store this server's part of a push, on a server that is not the first. The first decides when to apply it."""
        with self.lock:
            self.pushes[lease_number] = push
            self.lock.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition()` is true or a failure is stored.

        The caller holds the lock, which is released during the wait.

        Raises:
            RunError: neither happened within `timeout_seconds`.
        """
        if not self.lock.wait_for(lambda: condition() or self.failure is not None, timeout=self.timeout_seconds):
            raise RunError(
                f"this server did not receive its part of a gradient within {self.timeout_seconds:g} s.",
                cause="a worker was lost while it sent its gradient to the servers, or a link is slow",
                hint="--train.timeout_seconds with more seconds",
            )
