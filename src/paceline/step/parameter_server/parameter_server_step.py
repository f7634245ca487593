"""The step of a parameter server (Li et al., OSDI 2014): workers compute gradients, the server updates the weights.

With a staleness bound of 0, the gradients of a batch's shares are summed and applied as one update, as with `ddp`. With
a larger bound, each share is one update, applied when it arrives. If this update would make another share in flight
staler than the bound, the server waits for that share first (Ho et al., NIPS 2013; staleness is counted in updates).

With several servers, each owns some of the parameters and their optimizer state. The first server leases shares and
decides the order of updates. A worker sends the first server's part of a gradient last. So the other servers have
their parts when the first server tells them which gradient comes next.
"""

import math
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from paceline.config.update_rule import UpdateRule as Rule
from paceline.data.order.leases import BatchShare, Lease, Leases
from paceline.errors import RunError
from paceline.launch.failures.failure_record import annotate_step
from paceline.launch.inherited_environment import attempt_folder
from paceline.step.microbatches import StepBatch
from paceline.step.parameter_server.lost_node_watch import watch_lost_nodes
from paceline.step.parameter_server.push_messages import (
    AppliedUpdate,
    GradientPush,
    PushedBatch,
    PushedTotals,
    push_from_json,
    push_to_json,
    sum_pushed_gradients,
)
from paceline.step.parameter_server.served_tensors import served_weights, sparse_tables
from paceline.step.parameter_server.server_threads import ServerThreads
from paceline.step.parameter_server.state import ServerState
from paceline.step.parameter_server.transport import CONNECT_SECONDS, ConnectionAcceptor
from paceline.step.replica_context import ReplicaContext
from paceline.step.step_totals import AsyncScalars, StepResult
from paceline.step.synchronous import SynchronousStep
from paceline.torch_internals.private_api import divide_all

_RETAINED_BATCHES = 256  # see `num_retained_batches`
_POLL_SECONDS = 0.5
# The first server's decisions, which it sends to the others: apply these gradients; no news yet; return from the step.
_APPLY_DECISION, _WAIT_DECISION, _DONE_DECISION = "apply", "wait", "done"


class ServerStep(SynchronousStep):
    """The parameter server's step.

    Results are read in the order of the batches. So a batch that is not complete yet holds back its own result and
    those of all newer batches: `lag` batches in total.

    `sync_after_update` sends each server's parameters to all servers. It is not called after every update, but only
    before the whole model is evaluated or saved.
    """

    def __init__(
        self,
        replica: ReplicaContext,
        *,
        rule: Rule,
        num_shares: int,
        micro_batch_size: int,
        sync_after_update: Callable[[], None],
    ) -> None:
        super().__init__(replica)
        self.lag = 0
        self._max_shares = num_shares
        self._micro_batch_size = micro_batch_size
        self._sync_after_update = sync_after_update
        self._is_synchronized = True
        self._leases = Leases(bound=rule.staleness)
        self._local_parameters: list[nn.Parameter] = []
        self._batches: dict[int, PushedBatch] = {}
        self._open_batches: deque[PushedBatch] = deque()
        self._state: ServerState | None = None
        self._server_threads: ServerThreads | None = None
        self._waited_seconds = 0.0
        self._last_decision_time = time.monotonic()
        self.record: list[AppliedUpdate] | None = None  # set to a list to record updates for a replay

    @override
    def run(self, step_batch: StepBatch, *, stop: bool = False) -> StepResult:
        """Offer the batch's shares to the workers, and apply pushed gradients.

        With a staleness bound of 0, return when all shares of the batch are applied. With a larger bound, return when
        the shares that no worker has leased yet would fit into one batch. The batch's result is known when all shares
        of the batch are applied.
        """
        start_time, waited_before = time.perf_counter(), self._waited_seconds
        state = self._state or self._open_server()
        pushed_batch = self._start_batch(step_batch, stop=stop)
        location = _location(step_batch, micro_batch_size=self._micro_batch_size)
        sizes = [micro.num_samples for micro in step_batch.batch.micro]  # type: ignore[attr-defined]
        shares = pushed_batch.shares if self.replica.world.is_main else ()
        state.offer_shares(self.steps_done, location, shares, micro_sizes=sizes)
        self.steps_done += 1
        if self._leases.sums_shares:
            self._apply_until(state, until=lambda: not self._open_batches)
        else:
            self._apply_until(state, until=lambda: self._leases.num_free <= self._max_shares)
        self.lag = len(self._open_batches)
        pushed_batch.result.communication_seconds = self._waited_seconds - waited_before
        pushed_batch.result.compute_seconds = (
            time.perf_counter() - start_time - pushed_batch.result.communication_seconds
        )
        return pushed_batch.result

    @override
    def finish_pending(self) -> None:
        """Wait until all shares of all open batches are applied.

        If the server is not open yet, open it: the caller may now run a long evaluation before the first batch, and an
        open server tells the workers to wait.
        """
        self._apply_until(self._state or self._open_server(), until=lambda: not self._open_batches)
        if not self._is_synchronized:
            self._sync_after_update()
            self._is_synchronized = True

    # The loop keeps this many recent batches, to show one of them if its loss is not finite. A server's batches hold no
    # samples, so they take little memory.
    num_retained_batches = _RETAINED_BATCHES
    has_delayed_results = True

    @override
    def collect_staleness(self) -> list[dict[str, Any]]:
        """Return the gradient staleness of each worker."""
        counts_by_worker: dict[str, dict[int, int]] = {}
        for worker, counts in self._leases.staleness_counts.items():
            worker_counts = counts_by_worker.setdefault(
                self._state.worker_names[worker] if self._state is not None else str(worker), {}
            )
            for staleness, count in counts.items():
                worker_counts[staleness] = worker_counts.get(staleness, 0) + count
        return [
            {"who": worker_name, "late": [list(pair) for pair in sorted(counts.items())]}
            for worker_name, counts in sorted(counts_by_worker.items())
        ]

    @override
    def new_notes(self) -> list[str]:
        """Return the notes about workers that were lost or have restarted."""
        if self._state is None:
            return []
        with self._state.lock:
            notes, self._state.notes = self._state.notes, []
        return notes

    @override
    def close(self) -> None:
        """Close the connections to all workers."""
        if self._server_threads is not None:
            self._server_threads.close()
        super().close()

    def _open_server(self) -> ServerState:
        """Open the server, at the first batch or evaluation. Workers get no weights before a batch is offered."""
        world, members = self.replica.world, [m for m in self.replica.update.named_parameters if m.parameter.numel()]
        assert world.worker_endpoint is not None
        self._local_parameters = [member.parameter for member in members]
        tables = sparse_tables(self.replica.model)
        for member in self.replica.update.named_parameters:
            if not member.parameter.numel():  # on another server: the optimizer gets a zero gradient
                member.parameter.grad = _zero_gradient(member.parameter, is_sparse=member.name in tables)
        served = served_weights(self.replica.model, members)
        self._state = ServerState(leases=self._leases, served=served, timeout_seconds=world.timeout_seconds)
        acceptor = ConnectionAcceptor(world.worker_endpoint, server=world.rank, timeout_seconds=world.timeout_seconds)
        self._server_threads = ServerThreads(self._state, acceptor=acceptor, is_first_server=world.is_main)
        self._server_threads.open()
        if world.is_main:
            watch_lost_nodes(self._state, world.worker_endpoint.launch_info, attempt_folder(os.environ))
        return self._state

    def _start_batch(self, step_batch: StepBatch, *, stop: bool) -> PushedBatch:
        """Divide a batch into shares, and add it to the open batches."""
        num_shares = min(self._max_shares, step_batch.num_micro)
        reduction = PushedTotals(num_micro=step_batch.num_micro, wait=lambda: self._wait_for_shares(batch))
        result = StepResult(
            step=self.steps_done + 1,
            samples=step_batch.num_samples,
            reduction=reduction,
            async_grad_norm=None,
            compute_seconds=0.0,
            communication_seconds=0.0,
        )
        shares = [
            BatchShare(step=self.steps_done, number=number, num_shares=num_shares) for number in range(num_shares)
        ]
        batch = PushedBatch(number=self.steps_done, shares=shares, stop=stop, reduction=reduction, result=result)
        self._batches[self.steps_done] = batch
        self._open_batches.append(batch)
        return batch

    def _wait_for_shares(self, batch: PushedBatch) -> None:
        if self._state is not None and not batch.is_complete:
            self._apply_until(self._state, until=lambda: batch.is_complete)

    def _apply_until(self, state: ServerState, *, until: Callable[[], bool]) -> None:
        """Apply pushed gradients on the first server until `until()` is true; the other servers follow its decisions.

        Raises:
            RunError: no worker was connected for `train.timeout_seconds`, or for a minute if that is longer.
        """
        with state.lock:
            if not self.replica.world.is_main:
                return self._follow_decisions(state)
            while True:
                if state.failure is not None:
                    raise state.failure
                leases = self._leases.ready_leases()
                if leases:
                    self._apply_leases(state, leases, [state.pushes.pop(lease.number) for lease in leases])
                elif until():
                    return self._broadcast_decision(_DONE_DECISION)
                else:
                    self._wait(state)

    def _wait(self, state: ServerState) -> None:
        """Wait for a change of the state. Raise an error if no worker has been connected for too long."""
        start_time = time.perf_counter()
        state.lock.wait(_POLL_SECONDS)
        self._waited_seconds += time.perf_counter() - start_time
        if time.monotonic() - self._last_decision_time > state.patience:
            # without news, the other servers would time out
            self._broadcast_decision(_WAIT_DECISION)
        limit = max(state.timeout_seconds, CONNECT_SECONDS)
        if not state.num_workers and time.monotonic() - state.last_disconnect_time > limit:
            raise RunError(
                f"no worker has connected for {limit:g} s.",
                cause="the workers were killed, or can't reach this process",
                hint=f"more memory for the workers, or --train.timeout_seconds {2 * limit:.0f}",
            )

    def _broadcast_decision(self, kind: str, leases: Sequence[Lease] = (), pushes: Sequence[GradientPush] = ()) -> None:
        """Send the first server's decision to the other servers, with the leases to apply and their pushes."""
        self._last_decision_time = time.monotonic()
        if self.replica.world.world_size > 1:
            pairs = zip(leases, pushes, strict=True)
            updates = [
                [lease.number, lease.share.step, lease.share.number, push_to_json(push)] for lease, push in pairs
            ]
            self.replica.world.share_json([kind, updates, self._leases.oldest_number])

    def _follow_decisions(self, state: ServerState) -> None:
        """Apply the first server's decisions. The caller holds the lock, which is released during each wait."""
        while True:
            state.lock.release()
            try:
                kind, updates, oldest_lease = self.replica.world.share_json(None)
            finally:
                state.lock.acquire()
            if state.failure is not None:
                raise state.failure
            if kind == _DONE_DECISION:
                return
            if kind == _APPLY_DECISION:
                state.wait_until(lambda decided=updates: all(lease in state.pushes for lease, *_ in decided))  # type: ignore[misc]
                pushes = {
                    share: push_from_json(fields, gradients=state.pushes.pop(lease).gradients)
                    for lease, _, share, fields in updates
                }
                self._apply_update(state, self._batches[updates[0][1]], pushes)
                for lease in [lease for lease in state.pushes if lease < oldest_lease]:  # leases of lost workers
                    del state.pushes[lease]

    def _apply_leases(self, state: ServerState, leases: Sequence[Lease], pushes: Sequence[GradientPush]) -> None:
        """Apply the pushes of these leases as one update, on all servers."""
        self._broadcast_decision(_APPLY_DECISION, leases, pushes)
        numbers = [lease.share.number for lease in leases]
        batch = self._batches[leases[0].share.step]
        is_applied = self._apply_update(state, batch, dict(zip(numbers, pushes, strict=True)))
        if self.record is not None:
            pairs = zip(leases, pushes, strict=True)
            self.record += [
                AppliedUpdate(share=lease.share, versions=push.versions, is_applied=is_applied) for lease, push in pairs
            ]
        self._leases.record_update(leases, is_applied=is_applied)

    def _apply_update(self, state: ServerState, batch: PushedBatch, pushes: dict[int, GradientPush]) -> bool:
        """Apply pushes, given by share number, as one update. Return whether the weights have changed."""
        batch.pushes |= {number: replace(push, gradients=()) for number, push in pushes.items()}
        count = math.fsum(push.count for push in pushes.values())
        with annotate_step(batch.number + 1):
            is_applied = (self._leases.sums_shares or bool(count)) and self._commit(
                batch, list(pushes.values()), count=count
            )
            state.version += int(is_applied)
            self._is_synchronized = self.replica.world.world_size == 1
            if batch.is_complete:
                self._complete_batch(state, batch)
        state.lock.notify_all()
        return is_applied

    def _commit(self, batch: PushedBatch, pushes: Sequence[GradientPush], *, count: float) -> bool:
        """Update this server's parameters, and return whether the update was applied.

        `count` divides the gradients if the workers have not divided their losses.
        """
        update, sums_shares = self.replica.update, self._leases.sums_shares
        gradients = sum_pushed_gradients(pushes) if len(pushes) > 1 else pushes[0].gradients
        if pushes[0].divided_by is None:
            divide_all([g for g in gradients if g is not None and not g.is_sparse], count)
            gradients = [(g / count).coalesce() if g is not None and g.is_sparse else g for g in gradients]
        for parameter, gradient in zip(self._local_parameters, gradients, strict=True):
            parameter.grad = gradient
        if sums_shares:
            batch.reduction.store(pushes, stop=batch.stop, sums_shares=True)
        loss = batch.result.loss if sums_shares else pushes[0].loss
        # If the loss is not finite, `commit` blames a term whose count is 0. But in a single share, one of several
        # terms may have the count 0 without an error. So the counts of a single share are not passed.
        counts = batch.result.totals.counts if sums_shares else None
        nonfinite_terms = batch.result.totals.nonfinite_terms if sums_shares else ()
        grad_norm, is_applied = update.commit(
            step=batch.number + 1,
            loss=loss,
            counts=counts,
            nonfinite_terms=nonfinite_terms,
            steps_lr_schedulers=sums_shares,
        )
        batch.result.async_grad_norm = None if grad_norm is None else AsyncScalars(grad_norm)
        batch.result.lr = update.lr
        batch.result.skipped = not is_applied
        return is_applied

    def _complete_batch(self, state: ServerState, batch: PushedBatch) -> None:
        """Complete a batch whose shares are all applied. If each share was one update, also step the LR schedulers."""
        del self._batches[batch.number]
        state.complete_batch(batch.number)
        if not self._leases.sums_shares:
            batch.reduction.store(batch.ordered_pushes(), stop=batch.stop, sums_shares=False)
            self.replica.update.step_lr_schedulers()
        while self._open_batches and self._open_batches[0].is_complete:
            self._open_batches.popleft()
        self.lag = len(self._open_batches)


def _location(step_batch: StepBatch, *, micro_batch_size: int) -> dict[str, Any]:
    """Return the location of the batch's samples, from which a worker reads them.

    `summary` is the length and checksum of the dataset. A batch has it at the start of an epoch.
    """
    batch, summary = step_batch.batch, step_batch.summary  # type: ignore[attr-defined]
    location = {"cursor": batch.cursor.as_json(), "micro_batch_size": micro_batch_size}
    return location if summary is None else {**location, "epoch": batch.next_cursor.epoch, "summary": asdict(summary)}


def _zero_gradient(parameter: nn.Parameter, *, is_sparse: bool) -> Tensor:
    """Return a zero gradient for a parameter of another server. `is_sparse`: the parameter is a sparse table."""
    return torch.zeros_like(parameter, layout=torch.sparse_coo).coalesce() if is_sparse else torch.zeros_like(parameter)
