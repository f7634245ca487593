"""List common mistakes in combining the gradients of several ranks, each as a coefficient for every microbatch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class GradientFacts:
    """Facts about a wrong gradient besides its values; None if a fact is not known."""

    counts: Vector
    """The count of each microbatch: the number (of targets, for example) by which its loss sum is divided."""
    ranks: int
    """The number of replicas."""
    samples: int | None = None
    """The number of samples in the batch."""
    ranks_agree: bool | None = None
    """Whether all ranks have the same gradient."""
    is_everywhere: bool | None = None
    """Whether the gradient of every parameter is wrong."""
    is_data_correct: bool | None = None
    """Whether the ranks read the right samples."""
    axes: Mapping[str, int] = field(default_factory=dict)
    """The sizes of the axes that split layers."""
    replica_names: Sequence[str] = ()
    """The names of the replicas if each is a group of ranks; otherwise empty."""

    def rank_name(self, rank: int) -> str:
        """Return the name of a rank, or of the replica if a replica is a group of ranks."""
        return self.replica_names[rank] if rank < len(self.replica_names) else f"rank {rank}"

    @property
    def rank_of_microbatch(self) -> NDArray[np.int64]:
        """The rank of each microbatch."""
        owners: NDArray[np.int64] = np.arange(len(self.counts)) % self.ranks
        return owners

    @property
    def microbatches_per_rank(self) -> int:
        """The largest number of microbatches on a rank."""
        return -(-len(self.counts) // self.ranks)


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A mistake, the weight that it gives each microbatch, and the facts that it predicts.

    An `expects_...` that is None predicts nothing.
    """

    cause: str
    weights: Vector
    expects_agreement: bool | None = None
    expects_everywhere: bool | None = None
    expects_wrong_data: bool = False

    def contradiction_penalty(self, facts: GradientFacts) -> int:
        """Return how strongly the known facts contradict the hypothesis."""
        penalty = 0
        if None not in (self.expects_agreement, facts.ranks_agree) and self.expects_agreement != facts.ranks_agree:
            penalty += 4
        if (
            None not in (self.expects_everywhere, facts.is_everywhere)
            and self.expects_everywhere != facts.is_everywhere
        ):
            penalty += 1
        return penalty + (2 if self.expects_wrong_data and facts.is_data_correct else 0)


def list_hypotheses(facts: GradientFacts) -> list[Hypothesis]:
    """Return all hypotheses, the common ones first."""
    hypotheses = [*_factor_hypotheses(facts), *_mean_hypotheses(facts)]
    if facts.microbatches_per_rank > 1:
        hypotheses += _overwrite_hypotheses(facts)
    if facts.ranks > 1:
        for rank in range(facts.ranks):
            hypotheses += _rank_hypotheses(facts, rank)
    if len(facts.counts) > 1:
        for index in range(len(facts.counts)):
            hypotheses += _microbatch_hypotheses(facts, index)
    return hypotheses


def _factor_hypotheses(facts: GradientFacts) -> Iterator[Hypothesis]:
    """Yield hypotheses with one factor for all microbatches. Mistakes with an equal factor form one hypothesis."""
    ones, total = np.ones(len(facts.counts)), float(facts.counts.sum())
    ranks, per_rank, num_microbatches = facts.ranks, facts.microbatches_per_rank, len(facts.counts)
    meanings: dict[str, tuple[float, list[str]]] = {}

    def add_meaning(factor_text: str, factor: float, meaning: str) -> None:
        meanings.setdefault(factor_text, (factor, []))[1].append(meaning)

    if ranks > 1:
        add_meaning(f"{ranks}", ranks, "summed instead of averaged, reduced twice, or the loss multiplied by the ranks")
        add_meaning(f"1/{ranks}", 1 / ranks, "averaged over ranks after the division by the count")
        add_meaning(f"1/{ranks**2}", 1 / ranks**2, "divided by the ranks twice")
        add_meaning(f"{ranks**2}", ranks**2, "reduced twice and summed instead of averaged")
    for axis, size in facts.axes.items():
        add_meaning(
            f"{size}",
            size,
            f"summed over the {size} {axis} ranks (the {axis} degree), which each have the whole sum",
        )
        add_meaning(
            f"1/{size}",
            1 / size,
            f"divided by the {size} {axis} ranks (the {axis} degree): an average instead of a sum",
        )
    if per_rank > 1:
        add_meaning(f"{per_rank}", per_rank, "accumulated without dividing by the microbatches of a rank")
        add_meaning(f"1/{per_rank}", 1 / per_rank, "divided by the count, and then by the microbatches of a rank")
    if num_microbatches > 1:
        add_meaning(f"{num_microbatches}", num_microbatches, "means of microbatches added up without a division")
    add_meaning("2", 2.0, "backward ran twice, or the gradient was added twice")
    yield Hypothesis(cause="not trained: the gradient is zero", weights=ones * 0.0)
    yield Hypothesis(cause="the sign is wrong: the loss goes up", weights=-ones)
    for factor_text, (factor, texts) in meanings.items():
        yield Hypothesis(cause=f"a factor of {factor_text}: " + "; or ".join(texts), weights=ones * factor)
    if total > 1.0:
        yield Hypothesis(cause=f"a factor of {total:g}: never divided by the count", weights=ones * total)
        yield Hypothesis(cause=f"a factor of 1/{total:g}: divided by the count twice", weights=ones / total)
    if facts.samples and total != facts.samples:
        cause = f"wrong denominator: divided by the {facts.samples} samples instead of the count {total:g}"
        yield Hypothesis(cause=cause, weights=ones * total / facts.samples)


def _mean_hypotheses(facts: GradientFacts) -> Iterator[Hypothesis]:
    """Yield hypotheses of a mean of means: x1/n1 + x2/n2 is not (x1 + x2)/(n1 + n2)."""
    counts, rank_of_microbatch, ranks = facts.counts, facts.rank_of_microbatch, facts.ranks
    num_microbatches, total = len(counts), counts.sum()
    count_by_rank = np.array([counts[rank_of_microbatch == rank].sum() for rank in range(ranks)])
    microbatches_in_rank = np.array([(rank_of_microbatch == rank).sum() for rank in range(ranks)])[rank_of_microbatch]
    with np.errstate(divide="ignore", invalid="ignore"):
        weights_by_rank_count = np.nan_to_num(total / count_by_rank[rank_of_microbatch], posinf=0.0)
        weights_by_own_count = np.nan_to_num(total / counts, posinf=0.0)
    prefix = "a mean of means: divided by each"
    yield Hypothesis(cause=f"{prefix} rank's own count", weights=weights_by_rank_count / ranks)
    yield Hypothesis(cause=f"{prefix} rank's own count, and summed over ranks", weights=weights_by_rank_count)
    yield Hypothesis(cause=f"{prefix} microbatch's own count", weights=weights_by_own_count / num_microbatches)
    yield Hypothesis(
        cause=f"{prefix} microbatch's own count, averaged in a rank, then over ranks",
        weights=weights_by_own_count / microbatches_in_rank / ranks,
    )
    yield Hypothesis(cause=f"{prefix} microbatch's own count, and added up", weights=weights_by_own_count)
    yield Hypothesis(
        cause=f"{prefix} microbatch's own count, summed in a rank, averaged over ranks",
        weights=weights_by_own_count / ranks,
    )
    yield Hypothesis(
        cause=f"{prefix} microbatch's own count, averaged in a rank, summed over ranks",
        weights=weights_by_own_count / microbatches_in_rank,
    )


def _overwrite_hypotheses(facts: GradientFacts) -> Iterator[Hypothesis]:
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


def _rank_hypotheses(facts: GradientFacts, rank: int) -> Iterator[Hypothesis]:
    """Yield hypotheses in which this rank's gradient counts alone, twice or not at all."""
    owner, counts, ranks = facts.rank_of_microbatch, facts.counts, facts.ranks
    rank_weights = (owner == rank).astype(np.float64)
    rank_count = float(counts @ rank_weights)
    count_ratio = counts.sum() / rank_count if rank_count else 1.0
    prefix = f"not reduced: {facts.rank_name(rank)}'s own gradient"
    yield Hypothesis(cause=f"{prefix} alone", weights=rank_weights, expects_agreement=False, expects_everywhere=False)
    yield Hypothesis(
        cause=f"{prefix}, divided by its own count",
        weights=rank_weights * count_ratio,
        expects_agreement=False,
        expects_everywhere=False,
    )
    yield Hypothesis(
        cause=f"{prefix}, divided by the ranks",
        weights=rank_weights / ranks,
        expects_agreement=False,
        expects_everywhere=False,
    )
    yield Hypothesis(
        cause=f"{prefix}, multiplied by the ranks",
        weights=rank_weights * ranks,
        expects_agreement=False,
        expects_everywhere=False,
    )
    missing_cause = f"missing on {facts.rank_name(rank)}: frozen, detached or skipped there"
    yield Hypothesis(cause=missing_cause, weights=1.0 - rank_weights, expects_agreement=True, expects_everywhere=False)
    other_counts = counts.sum() - rank_count
    if other_counts:
        cause = f"{missing_cause}, and divided by the others' count"
        yield Hypothesis(
            cause=cause,
            weights=(1.0 - rank_weights) * counts.sum() / other_counts,
            expects_agreement=True,
            expects_everywhere=False,
        )
    twice_cause = f"{facts.rank_name(rank)}'s gradient counts twice"
    if rank >= len(counts) % ranks > 0:
        twice_cause += ": added twice, or the substitute microbatch of a rank without samples was counted"
    yield Hypothesis(cause=twice_cause, weights=1.0 + rank_weights, expects_agreement=True)
    for name, weights in (("", rank_weights * ranks), (", divided by their own count", rank_weights * count_ratio)):
        cause = f"all ranks have {facts.rank_name(rank)}'s samples{name}"
        yield Hypothesis(
            cause=cause, weights=weights, expects_agreement=True, expects_everywhere=True, expects_wrong_data=True
        )


def _microbatch_hypotheses(facts: GradientFacts, index: int) -> Iterator[Hypothesis]:
    """Yield hypotheses in which this microbatch is missing or counts twice."""
    ones = np.ones(len(facts.counts))
    indicator = np.zeros(len(facts.counts))
    indicator[index] = 1.0
    for fault, reason, count_text, weights in (
        ("is missing", "samples were dropped", "the count covers only the rest", ones - indicator),
        ("counts twice", "samples were repeated", "the count covers it twice too", ones + indicator),
    ):
        cause = f"microbatch {index} {fault}"
        yield Hypothesis(
            cause=f"{cause}: {reason}",
            weights=weights,
            expects_agreement=True,
            expects_everywhere=True,
            expects_wrong_data=True,
        )
        count = float(weights @ facts.counts)
        if count:
            cause = f"{cause}, and {count_text}: {reason}"
            scaled = weights * facts.counts.sum() / count
            yield Hypothesis(
                cause=cause, weights=scaled, expects_agreement=True, expects_everywhere=True, expects_wrong_data=True
            )
