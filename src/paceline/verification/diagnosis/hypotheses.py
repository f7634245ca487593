"""Common mistakes in combining the gradients of several ranks, each as weights of the microbatches."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """The other known facts about a wrong gradient. None: not known.

    `ranks` are those that the samples are dealt to, called `members` if each is more than one rank; `axes` are the
    degrees of the other mesh axes.
    """

    counts: Vector
    ranks: int
    samples: int | None = None
    agree: bool | None = None
    everywhere: bool | None = None
    data_right: bool | None = None
    axes: Mapping[str, int] = field(default_factory=dict)
    members: Sequence[str] = ()

    def who(self, rank: int) -> str:
        """Return a rank's name."""
        return self.members[rank] if rank < len(self.members) else f"rank {rank}"

    @property
    def owner(self) -> NDArray[np.int64]:
        """The rank of each microbatch."""
        found: NDArray[np.int64] = np.arange(len(self.counts)) % self.ranks
        return found

    @property
    def rounds(self) -> int:
        """The most microbatches that a rank has."""
        return -(-len(self.counts) // self.ranks)


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A weighting, what it would mean, and what it predicts of the facts."""

    cause: str
    weights: Vector
    agree: bool | None = None
    everywhere: bool | None = None
    blames_data: bool = False

    def strangeness(self, facts: GradientFacts) -> int:
        """Return how strongly the known facts contradict the hypothesis."""
        against = 0
        if None not in (self.agree, facts.agree) and self.agree != facts.agree:
            against += 4
        if None not in (self.everywhere, facts.everywhere) and self.everywhere != facts.everywhere:
            against += 1
        return against + (2 if self.blames_data and facts.data_right else 0)


def guesses(facts: GradientFacts) -> list[Hypothesis]:
    """Return all hypotheses, the usual ones first."""
    found = [*_factors(facts), *_means(facts)]
    if facts.rounds > 1:
        found += _overwritten(facts)
    if facts.ranks > 1:
        for rank in range(facts.ranks):
            found += _of_rank(facts, rank)
    if len(facts.counts) > 1:
        for index in range(len(facts.counts)):
            found += _of_microbatch(facts, index)
    return found


def _factors(facts: GradientFacts) -> Iterator[Hypothesis]:
    """Yield hypotheses of one factor for all; if several mistakes share a factor, all are named."""
    ones, total = np.ones(len(facts.counts)), float(facts.counts.sum())
    ranks, rounds, num = facts.ranks, facts.rounds, len(facts.counts)
    meanings: dict[str, tuple[float, list[str]]] = {}

    def mean(shown: str, factor: float, meaning: str) -> None:
        meanings.setdefault(shown, (factor, []))[1].append(meaning)

    if ranks > 1:
        mean(f"{ranks}", ranks, "summed instead of averaged, reduced twice, or the loss multiplied by the ranks")
        mean(f"1/{ranks}", 1 / ranks, "averaged over ranks after the division by the count")
        mean(f"1/{ranks**2}", 1 / ranks**2, "divided by the ranks twice")
        mean(f"{ranks**2}", ranks**2, "reduced twice and summed instead of averaged")
    for axis, size in facts.axes.items():
        mean(f"{size}", size, f"summed over the {size} {axis} ranks although each has all of it (the {axis} degree)")
        mean(
            f"1/{size}",
            1 / size,
            f"divided by the {size} {axis} ranks (the {axis} degree): an average instead of a sum",
        )
    if rounds > 1:
        mean(f"{rounds}", rounds, "accumulated without dividing by the microbatches of a rank")
        mean(f"1/{rounds}", 1 / rounds, "also divided by the microbatches of a rank, or only its last one counted")
    if num > 1:
        mean(f"{num}", num, "means of microbatches added up without a division")
    mean("2", 2.0, "backward ran twice, or the gradient was added twice")
    yield Hypothesis(cause="not trained: the gradient is zero", weights=ones * 0.0)
    yield Hypothesis(cause="the sign is wrong: the loss goes up", weights=-ones)
    for shown, (factor, texts) in meanings.items():
        yield Hypothesis(cause=f"a factor of {shown}: " + "; or ".join(texts), weights=ones * factor)
    if total > 1.0:
        yield Hypothesis(cause=f"a factor of {total:g}: never divided by the count", weights=ones * total)
        yield Hypothesis(cause=f"a factor of 1/{total:g}: divided by the count twice", weights=ones / total)
    if facts.samples and total != facts.samples:
        cause = f"wrong denominator: divided by the {facts.samples} samples instead of the count {total:g}"
        yield Hypothesis(cause=cause, weights=ones * total / facts.samples)


def _means(facts: GradientFacts) -> Iterator[Hypothesis]:
    """Yield hypotheses of a mean of means: x1/n1 + x2/n2 is not (x1 + x2)/(n1 + n2)."""
    counts, owner, ranks = facts.counts, facts.owner, facts.ranks
    num, total = len(counts), counts.sum()
    per_rank = np.array([counts[owner == rank].sum() for rank in range(ranks)])
    in_rank = np.array([(owner == rank).sum() for rank in range(ranks)])[owner]
    with np.errstate(divide="ignore", invalid="ignore"):
        of_ranks = np.nan_to_num(total / per_rank[owner], posinf=0.0)
        of_micro = np.nan_to_num(total / counts, posinf=0.0)
    mean = "a mean of means: divided by each"
    yield Hypothesis(cause=f"{mean} rank's own count", weights=of_ranks / ranks)
    yield Hypothesis(cause=f"{mean} rank's own count, and summed over ranks", weights=of_ranks)
    yield Hypothesis(cause=f"{mean} microbatch's own count", weights=of_micro / num)
    yield Hypothesis(
        cause=f"{mean} microbatch's own count, then averaged rank by rank", weights=of_micro / in_rank / ranks
    )
    yield Hypothesis(cause=f"{mean} microbatch's own count, and added up", weights=of_micro)
    yield Hypothesis(
        cause=f"{mean} microbatch's own count, summed in a rank, averaged over ranks", weights=of_micro / ranks
    )
    yield Hypothesis(
        cause=f"{mean} microbatch's own count, averaged in a rank, summed over ranks", weights=of_micro / in_rank
    )


def _overwritten(facts: GradientFacts) -> Iterator[Hypothesis]:
    """Yield hypotheses in which each rank keeps only one of its microbatches."""
    index = np.arange(len(facts.counts))
    last = index + facts.ranks >= len(index)
    first = index < facts.ranks
    yield Hypothesis(
        cause="only the last microbatch of each rank counts: gradients overwritten, not accumulated",
        weights=last.astype(np.float64),
    )
    yield Hypothesis(
        cause="only the first microbatch of each rank counts: later ones are not added or not reduced",
        weights=first.astype(np.float64),
    )


def _of_rank(facts: GradientFacts, rank: int) -> Iterator[Hypothesis]:
    owner, counts, ranks = facts.owner, facts.counts, facts.ranks
    alone = (owner == rank).astype(np.float64)
    own = float(counts @ alone)
    share = counts.sum() / own if own else 1.0
    held = f"not reduced: {facts.who(rank)}'s own gradient"
    yield Hypothesis(cause=f"{held} alone", weights=alone, agree=False, everywhere=False)
    yield Hypothesis(cause=f"{held}, divided by its own count", weights=alone * share, agree=False, everywhere=False)
    yield Hypothesis(cause=f"{held}, averaged over ranks", weights=alone / ranks, agree=False, everywhere=False)
    yield Hypothesis(cause=f"{held}, multiplied by the ranks", weights=alone * ranks, agree=False, everywhere=False)
    missing = f"missing on {facts.who(rank)}: frozen, detached or skipped there"
    yield Hypothesis(cause=missing, weights=1.0 - alone, agree=True, everywhere=False)
    left = counts.sum() - own
    if left:
        cause = f"{missing}, and divided by the others' count"
        yield Hypothesis(cause=cause, weights=(1.0 - alone) * counts.sum() / left, agree=True, everywhere=False)
    twice = f"{facts.who(rank)}'s gradient counts twice"
    if rank >= len(counts) % ranks > 0:
        twice += ": added twice, or the substitute microbatch of a rank without samples was counted"
    yield Hypothesis(cause=twice, weights=1.0 + alone, agree=True)
    for name, weights in (("", alone * ranks), (", divided by their own count", alone * share)):
        cause = f"all ranks have {facts.who(rank)}'s samples{name}"
        yield Hypothesis(cause=cause, weights=weights, agree=True, everywhere=True, blames_data=True)


def _of_microbatch(facts: GradientFacts, index: int) -> Iterator[Hypothesis]:
    ones = np.ones(len(facts.counts))
    one = np.zeros(len(facts.counts))
    one[index] = 1.0
    for word, text, weights in (
        ("is missing", "samples were dropped", ones - one),
        ("counts twice", "samples were repeated", ones + one),
    ):
        cause = f"microbatch {index} {word}"
        yield Hypothesis(cause=f"{cause}: {text}", weights=weights, agree=True, everywhere=True, blames_data=True)
        count = float(weights @ facts.counts)
        if count:
            cause = f"{cause}, and the count covers only the rest: {text}"
            scaled = weights * facts.counts.sum() / count
            yield Hypothesis(cause=cause, weights=scaled, agree=True, everywhere=True, blames_data=True)
