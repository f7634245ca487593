"""What came of one batch whose shares workers have pushed, and what one push is."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.data.order.leases import BatchShare
from paceline.step.result import StepResult
from paceline.step.step_reduction import STOP, StepReduction, StepTotals

Told = Mapping[int, Mapping[str, tuple[float, float]]]


@dataclass(frozen=True, kw_only=True)
class GradientPush:
    """The gradients of a share's sums, one for each parameter, and `(sum, count)` of each term of each microbatch.

    Where the worker knew the counts before, it has divided by them: `divided_by` are those of the share, or of the
    whole batch where that is one update. `versions` are those of the weights that each server gave it.
    """

    gradients: Sequence[Tensor | None] = field(repr=False)
    terms: Told
    divided_by: Mapping[str, float] | None
    stop: bool = False
    versions: Sequence[int] = ()

    @property
    def count(self) -> float:
        """Of the only term."""
        return math.fsum(count for terms in self.terms.values() for _, count in terms.values())

    @property
    def counts(self) -> dict[str, float]:
        """Of each term."""
        found: dict[str, float] = {}
        for terms in self.terms.values():
            for name, (_, count) in terms.items():
                found[name] = found.get(name, 0.0) + count
        return found

    @property
    def loss(self) -> float:
        """Of this share alone, each term by its own count; one that has nothing here adds nothing."""
        sums: dict[str, float] = {}
        for terms in self.terms.values():
            for name, (total, _) in terms.items():
                sums[name] = sums.get(name, 0.0) + total
        counts = self.counts
        return sum(total / counts[name] if counts[name] else math.nan for name, total in sums.items() if total)


@dataclass(frozen=True, kw_only=True)
class AppliedUpdate:
    """An update of one share: whose gradient on which versions, one of each server's weights, in the order taken.

    `counts` is False where it was left out.
    """

    share: BatchShare
    versions: Sequence[int]
    counts: bool


class PushedJoint(StepReduction):
    """What a batch came to, once its shares are there: whoever asks before waits for them."""

    def __init__(self, *, num_micro: int, wait: Callable[[], None]) -> None:
        super().__init__(world=World.alone(), names=(), num_micro=num_micro)
        self._wait_for_all = wait

    def tell(self, pushes: Sequence[GradientPush], *, stop: bool, joins: bool) -> None:
        """All of its shares; where they are one update, each was divided by the counts of all."""
        self.names = tuple(next(iter(pushes[0].terms.values())))
        for push in pushes:
            for index, terms in push.terms.items():
                self.put(index, {n: (torch.tensor(t, dtype=torch.float64), c) for n, (t, c) in terms.items()})
        self.expect(_expected(pushes[:1] if joins else pushes))
        self.flag(STOP, float(stop or any(push.stop for push in pushes)))
        self.start()

    def agreed(self) -> StepTotals:
        """Read them."""
        self._wait_for_all()
        return super().agreed()


@dataclass(kw_only=True)
class PushedBatch:
    """A batch of which shares are free, under way, or taken."""

    number: int
    shares: Sequence[BatchShare]
    stop: bool
    joint: PushedJoint
    result: StepResult
    pushes: dict[int, GradientPush] = field(default_factory=dict)

    @property
    def is_whole(self) -> bool:
        """Whether every share has been taken."""
        return len(self.pushes) == len(self.shares)

    def in_order(self) -> list[GradientPush]:
        """By the number of the share, whoever came first."""
        return [push for _, push in sorted(self.pushes.items())]


def as_words(push: GradientPush) -> dict[str, Any]:
    """What the other servers need of it beside their own gradients."""
    return {"terms": push.terms, "divided_by": push.divided_by, "stop": push.stop, "versions": push.versions}


def from_words(words: Mapping[str, Any], *, gradients: Sequence[Tensor | None]) -> GradientPush:
    """With this server's own."""
    terms = {int(index): {n: (t, c) for n, (t, c) in terms.items()} for index, terms in words["terms"].items()}
    how = {name: words[name] for name in ("divided_by", "stop", "versions")}
    return GradientPush(gradients=gradients, terms=terms, **how)


def sum_pushed_gradients(pushes: Sequence[GradientPush]) -> list[Tensor | None]:
    """The gradients of a whole batch: shares are added in their order, so that who came first changes no bit."""
    found: list[Tensor | None] = []
    for parts in zip(*(push.gradients for push in pushes), strict=True):
        there = [part for part in parts if part is not None]
        total = there[0] if there else None
        for part in there[1:]:
            total = total + part
        found.append(total.coalesce() if total is not None and total.is_sparse else total)
    return found


def _expected(pushes: Sequence[GradientPush]) -> dict[str, Tensor]:
    """What these were divided by, together."""
    found: dict[str, float] = {}
    for push in pushes:
        for name, count in (push.divided_by or {}).items():
            found[name] = found.get(name, 0.0) + count
    return {name: torch.tensor(count, dtype=torch.float64) for name, count in found.items()}
