"""Zero-bubble V: stages go down through the ranks and up again, so that the first rank holds the first and the last."""

from collections import Counter

from paceline.schedule.program import Action, Op

Order = list[Action]


def vee(*, ranks: int, virtual: int) -> tuple[int, ...]:
    """Who holds which stage: 0 1 2 3 3 2 1 0."""
    assert virtual == 2
    return (*range(ranks), *reversed(range(ranks)))


def zbv(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Zero-bubble V, after the figure of Qi et al. 2024 (arXiv 2405.15362): a fixed pattern, no search.

    No rank holds more than `2 * ranks` of its half-long stages' activations, each until its weight gradients are done:
    as much as 1F1B's first rank. The paper lets go of part of an activation after I; that is not counted on here.
    With F, I and W of equal length and `micro >= 2 * (ranks - 1)` nothing is idle but `ranks - 1` of them per rank.
    """
    return [_of_rank(rank, ranks=ranks, micro=micro) for rank in range(ranks)]


def _of_rank(rank: int, *, ranks: int, micro: int) -> Order:
    """`F0` is a forward on the way down, `W1` weight gradients on the way up; what is used up is left out."""
    done: Counter[str] = Counter()
    order: Order = []

    def go(words: str, times: int) -> None:
        for word in words.split() * times:
            if done[word] < micro:
                stage = rank if word.endswith("0") else 2 * ranks - 1 - rank
                order.append(Action(op=Op(word[0]), stage=stage, microbatch=done[word]))
                done[word] += 1

    go("F0", 2 * (ranks - rank) - 1)  # until the first microbatch is back up here
    go("F1 F0", rank)
    go("F1 I1 W1", ranks - rank)  # until its gradient is back down here
    while min(done["F0"], done["F1"]) < micro:
        go("F0 I0 W0 F1 I1 W1", 1)
    go("I0 I1", rank)  # gradients that others wait for come first
    go("I0 W0", ranks - rank)
    for left in ("I0", "I1", "W0", "W1"):
        go(left, micro)
    return order
