"""The step of a parameter server (Li et al., OSDI 2014): workers compute, it has the weights and takes the updates.

With bound 0 the shares of a batch are added up and taken as one update, as the replicas of `ddp` do. With a bound above
0 each share is an update of its own, taken when it comes, unless another one that is under way would then be more
updates late than the bound allows: then that one is waited for (Ho et al., NIPS 2013, counted in updates).
"""

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from paceline.errors import RunError
from paceline.order.leases import Lease, Leases, Share
from paceline.place.units import trainable
from paceline.spec.update import Update as Rule
from paceline.step.desk import Desk, Held
from paceline.step.given import Given
from paceline.step.later import Later
from paceline.step.line import Door
from paceline.step.parts import Parts
from paceline.step.pushed import Push, PushedBatch, PushedJoint, joined
from paceline.step.result import StepResult
from paceline.step.spmd import SpmdStep
from paceline.survive.failure import at_step
from paceline.torch_private import divide_all

_LOOK_SECONDS = 0.5


class ServerStep(SpmdStep):
    """The server's. `lag` is how many of the newest batches are not whole: what came of them is heard later."""

    def __init__(self, parts: Parts, *, rule: Rule, shares: int, micro_batch_size: int) -> None:
        super().__init__(parts)
        self.lag = 0
        self._shares = shares
        self._micro_batch_size = micro_batch_size
        self._leases = Leases(bound=rule.staleness)
        self._parameters = parts.update.parameters
        self._batches: dict[int, PushedBatch] = {}
        self._open: deque[PushedBatch] = deque()
        self._desk: Desk | None = None
        self._door: Door | None = None
        self._waited = 0.0

    def run(self, given: Given, *, stop: bool = False) -> StepResult:
        """Give the batch's shares away; what came of it is known once all of them were pushed."""
        began, waited = time.perf_counter(), self._waited
        desk = self._desk or self._opened()
        batch = self._begun(given, stop=stop)
        with desk.lock:
            desk.where[self.step] = _where(given, micro_batch_size=self._micro_batch_size)
            self._leases.offer(batch.shares)
            desk.lock.notify_all()
        self.step += 1
        if self._leases.joins:
            self._serve(desk, until=lambda: not self._open)
        else:
            self._serve(desk, until=lambda: self._leases.num_free <= self._shares)
        batch.result.communication_seconds = self._waited - waited
        batch.result.compute_seconds = time.perf_counter() - began - batch.result.communication_seconds
        return batch.result

    def settle(self) -> None:
        """Wait until every share that was given away is taken: no worker holds anything then."""
        if self._desk is not None:
            self._serve(self._desk, until=lambda: not self._open)

    def lateness(self) -> list[dict[str, Any]]:
        """Of each worker."""
        found: dict[str, dict[int, int]] = {}
        for worker, counts in self._leases.late.items():
            name = self._desk.names[worker] if self._desk is not None else str(worker)
            for late, count in counts.items():
                found.setdefault(name, {})[late] = found.setdefault(name, {}).get(late, 0) + count
        return [
            {"who": who, "late": [list(pair) for pair in sorted(late.items())]} for who, late in sorted(found.items())
        ]

    def new_notes(self) -> list[str]:
        """Of workers that went and came."""
        if self._desk is None:
            return []
        with self._desk.lock:
            notes, self._desk.notes = self._desk.notes, []
        return notes

    def close(self) -> None:
        """Send the workers home."""
        if self._door is not None:
            self._door.is_closed = True
        if self._desk is not None:
            self._desk.close()
        super().close()

    def _opened(self) -> Desk:
        """From the first batch on: until then the weights may still be loaded."""
        world = self.parts.world
        weights, rest = [*self._parameters], fixed_tensors(self.parts.model)
        held = Held(weights=weights, rest=rest, model=model_digest(self.parts.model))
        self._desk = Desk(leases=self._leases, held=held, timeout_seconds=world.timeout_seconds)
        assert world.entrance is not None
        self._door = Door(world.entrance, timeout_seconds=world.timeout_seconds)
        self._desk.open(self._door)
        return self._desk

    def _begun(self, given: Given, *, stop: bool) -> PushedBatch:
        of = min(self._shares, given.num_micro)
        joint = PushedJoint(num_micro=given.num_micro, wait=lambda: self._until_whole(batch))
        result = StepResult(
            step=self.step + 1,
            samples=given.num_samples,
            joint=joint,
            norm=None,
            compute_seconds=0.0,
            communication_seconds=0.0,
        )
        shares = [Share(step=self.step, number=number, of=of) for number in range(of)]
        batch = PushedBatch(number=self.step, shares=shares, stop=stop, joint=joint, result=result)
        self._batches[self.step] = batch
        self._open.append(batch)
        return batch

    def _until_whole(self, batch: PushedBatch) -> None:
        if self._desk is not None and not batch.is_whole:
            self._serve(self._desk, until=lambda: batch.is_whole)

    def _serve(self, desk: Desk, *, until: Callable[[], bool]) -> None:
        """Take what comes until that is so.

        Raises:
            RunError: no worker has been there for `train.timeout_seconds`.
        """
        with desk.lock:
            while True:
                if desk.failure is not None:
                    raise desk.failure
                leases = self._leases.ready()
                if leases:
                    self._take(leases, [desk.pushes.pop(lease.number) for lease in leases])
                    desk.lock.notify_all()
                elif until():
                    break
                else:
                    began = time.perf_counter()
                    desk.lock.wait(_LOOK_SECONDS)
                    self._waited += time.perf_counter() - began
                    self._refuse_alone(desk)

    def _take(self, leases: Sequence[Lease], pushes: Sequence[Push]) -> None:
        """One update."""
        batch = self._batches[leases[0].share.step]
        for lease, push in zip(leases, pushes, strict=True):
            batch.pushes[lease.share.number] = replace(push, gradients=())
        count = math.fsum(push.count for push in pushes)
        is_nothing = not self._leases.joins and not count
        with at_step(batch.number + 1):
            taken = not is_nothing and self._commit(batch, pushes, count=count)
        self._leases.take(leases, counts=taken)
        if batch.is_whole:
            self._end(batch)

    def _commit(self, batch: PushedBatch, pushes: Sequence[Push], *, count: float) -> bool:
        update, joins = self.parts.update, self._leases.joins
        gradients = joined(pushes) if len(pushes) > 1 else pushes[0].gradients
        if not pushes[0].divided:
            dense = [g for g in gradients if g is not None and not g.is_sparse]
            divide_all(dense, count)
            gradients = [(g / count).coalesce() if g is not None and g.is_sparse else g for g in gradients]
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            parameter.grad = gradient
        if joins:
            batch.joint.tell(pushes, stop=batch.stop)
        loss = batch.result.loss if joins else pushes[0].loss
        counts = batch.result.agreed.counts if joins else pushes[0].counts
        norm, taken = update.commit(step=batch.number + 1, loss=loss, counts=counts, follow=joins)
        batch.result.norm = None if norm is None else Later(norm)
        batch.result.lr = update.lr
        batch.result.skipped = not taken
        return taken

    def _end(self, batch: PushedBatch) -> None:
        """All of its shares are taken: schedules count batches, whoever was first."""
        del self._batches[batch.number]
        if self._desk is not None:
            del self._desk.where[batch.number]
        if not self._leases.joins:
            batch.joint.tell(batch.in_order(), stop=batch.stop)
            self._refuse_empty(batch)
            self.parts.update.follow()
        while self._open and self._open[0].is_whole:
            self._open.popleft()
        self.lag = len(self._open)

    def _refuse_empty(self, batch: PushedBatch) -> None:
        """A share without a target makes no update; a whole batch without one is an error, as elsewhere."""
        agreed, update = batch.joint.agreed(), self.parts.update
        if 0 in agreed.counts.values() and not update.skips:
            raise update.refusal(step=batch.number + 1, loss=agreed.loss, counts=agreed.counts)

    def _refuse_alone(self, desk: Desk) -> None:
        limit = desk.timeout_seconds
        if not desk.num_workers and time.monotonic() - desk.alone_since > limit:
            raise RunError(
                f"no worker has been here for {limit:g} s.",
                cause="they were killed, or can't reach this process",
                hint=f"more memory for them, or --train.timeout_seconds {2 * limit:.0f}",
            )


def fixed_tensors(model: nn.Module) -> list[Any]:
    """Those that no update changes: frozen parameters and buffers."""
    moving = {id(member.parameter) for member in trainable(model)}
    frozen = [parameter for parameter in model.parameters() if id(parameter) not in moving]
    return [*frozen, *(buffer for buffer in model.buffers() if buffer.is_contiguous())]


def model_digest(model: nn.Module) -> str:
    """What tells models apart whose weights can't be each other's."""
    kinds = [
        (name, str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
    ]
    return hashlib.blake2b(repr(kinds).encode(), digest_size=16).hexdigest()


def _where(given: Given, *, micro_batch_size: int) -> dict[str, Any]:
    """What a worker needs to find the same samples."""
    batch = given.batch  # type: ignore[attr-defined]
    return {"cursor": batch.cursor.as_json(), "micro_batch_size": micro_batch_size}
