"""The gradients that workers push for the shares of a batch, and the totals of the batch."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from paceline.comm.process_group import World
from paceline.data.order.leases import BatchShare
from paceline.step.step_totals import STOP, StepResult, StepTotals, TotalsReduction

LossTerms = Mapping[int, Mapping[str, tuple[float, float]]]
"""The `(sum, count)` of each loss term, by the index of the microbatch and the name of the term."""


@dataclass(frozen=True, kw_only=True)
class GradientPush:
    """A worker's push for one share: `gradients`, one per parameter, and the loss terms of its microbatches.

    `divided_by` are the counts by which the worker has divided the loss, or None if it did not know them in advance.
    They are the counts of the share, or those of the whole batch if the batch is one update. `versions` has, for each
    server, the version of the weights that the worker used. `stop`: the worker wants the run to stop.
    """

    gradients: Sequence[Tensor | None] = field(repr=False)
    terms: LossTerms
    divided_by: Mapping[str, float] | None
    stop: bool = False
    versions: Sequence[int] = ()

    @property
    def count(self) -> float:
        """The count of the only term; the sum of the counts if there are several terms."""
        return math.fsum(count for terms in self.terms.values() for _, count in terms.values())

    @property
    def counts(self) -> dict[str, float]:
        """The count of each term."""
        totals: dict[str, float] = {}
        for terms in self.terms.values():
            for name, (_, count) in terms.items():
                totals[name] = totals.get(name, 0.0) + count
        return totals

    @property
    def loss(self) -> float:
        """The loss of this share: the sum over the terms of sum / count. A term whose sum is zero adds nothing."""
        sums: dict[str, float] = {}
        for terms in self.terms.values():
            for name, (total, _) in terms.items():
                sums[name] = sums.get(name, 0.0) + total
        counts = self.counts
        return sum(total / counts[name] if counts[name] else math.nan for name, total in sums.items() if total)


@dataclass(frozen=True, kw_only=True)
class AppliedUpdate:
    """A record of the update of one share.

    `versions` has, for each server, the version of the weights that the gradient was computed with. `is_applied` is
    False if the update was skipped.
    """

    share: BatchShare
    versions: Sequence[int]
    is_applied: bool


class PushedTotals(TotalsReduction):
    """The totals of a batch whose shares are pushed by workers; reading the totals waits for all shares."""

    def __init__(self, *, num_micro: int, wait: Callable[[], None]) -> None:
        super().__init__(world=World.alone(), names=(), num_micro=num_micro)
        self._wait_for_shares = wait

    def store(self, pushes: Sequence[GradientPush], *, stop: bool, sums_shares: bool) -> None:
        """Store the results of all shares.

        If the batch is one update (`sums_shares`), `divided_by` is the same in all pushes: the counts of the whole
        batch, or None. If each share is an update, `divided_by` has the counts of that share, or is None.
        """
        self.names = tuple(next(iter(pushes[0].terms.values())))
        for push in pushes:
            for index, terms in push.terms.items():
                self.store_terms(index, {n: (torch.tensor(t, dtype=torch.float64), c) for n, (t, c) in terms.items()})
        self.set_expected_counts(_sum_divisors(pushes[:1] if sums_shares else pushes))
        self.set_flag(STOP, float(stop or any(push.stop for push in pushes)))
        self.start()

    @override
    def wait_for_totals(self) -> StepTotals:
        """Wait for all shares and return the totals."""
        self._wait_for_shares()
        return super().wait_for_totals()


@dataclass(kw_only=True)
class PushedBatch:
    """A batch that is divided into shares. `pushes` has the applied shares' pushes by share number, without gradients.

    `number` is the batch's step, counted from zero. `stop`: this server wants to stop after the batch.
    """

    number: int
    shares: Sequence[BatchShare]
    stop: bool
    reduction: PushedTotals
    result: StepResult
    pushes: dict[int, GradientPush] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """True if every share is applied."""
        return len(self.pushes) == len(self.shares)

    def ordered_pushes(self) -> list[GradientPush]:
        """Return the pushes in the order of the shares' numbers."""
        return [push for _, push in sorted(self.pushes.items())]


def push_to_json(push: GradientPush) -> dict[str, Any]:
    """Return the push without its gradients, as JSON for the other servers, which have received their own gradients."""
    return {"terms": push.terms, "divided_by": push.divided_by, "stop": push.stop, "versions": push.versions}


def push_from_json(fields: Mapping[str, Any], *, gradients: Sequence[Tensor | None]) -> GradientPush:
    """Return the push that the JSON `fields` describe, with this server's gradients."""
    terms = {int(index): {n: (t, c) for n, (t, c) in terms.items()} for index, terms in fields["terms"].items()}
    options = {name: fields[name] for name in ("divided_by", "stop", "versions")}
    return GradientPush(gradients=gradients, terms=terms, **options)


def sum_pushed_gradients(pushes: Sequence[GradientPush]) -> list[Tensor | None]:
    """Return the sum of the shares' gradients, in the order of `pushes`.

    The caller orders the pushes by share, so that their order of arrival changes no bit.
    """
    sums: list[Tensor | None] = []
    for gradients in zip(*(push.gradients for push in pushes), strict=True):
        present = [gradient for gradient in gradients if gradient is not None]
        total = present[0] if present else None
        for gradient in present[1:]:
            total = total + gradient
        sums.append(total.coalesce() if total is not None and total.is_sparse else total)
    return sums


def _sum_divisors(pushes: Sequence[GradientPush]) -> dict[str, Tensor]:
    """Return the sum over the pushes of the counts that their losses were divided by, by term."""
    totals: dict[str, float] = {}
    for push in pushes:
        for name, count in (push.divided_by or {}).items():
            totals[name] = totals.get(name, 0.0) + count
    return {name: torch.tensor(count, dtype=torch.float64) for name, count in totals.items()}
