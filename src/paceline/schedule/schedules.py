"""The built-in schedules: functions that return every rank's *compute* order, and nothing else.

To add one, write a function here and add a row in `registry.py`. Sends, checks, bubble, memory, picture and runtime
follow from it. Stages are placed on the ranks in a loop (stage s on rank s mod ranks), `virtual` of them on each.
"""

from collections import Counter
from collections.abc import Sequence

from paceline.schedule.program import Action, Op

Order = list[Action]


def naive(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run one microbatch at a time through all forwards and backwards: model parallelism without a pipeline."""
    return [
        [
            Action(op=op, stage=stage, microbatch=m)
            for m in range(micro)
            for op in (Op.FORWARD, Op.BACKWARD)
            for stage in _stages(rank, ranks=ranks, virtual=virtual, op=op)
        ]
        for rank in range(ranks)
    ]


def gpipe(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run all forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    return breadth_first(ranks=ranks, micro=micro, virtual=virtual)


def breadth_first(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run all microbatches through a rank's first stage, then its second; backwards likewise (arXiv 2211.05953)."""
    orders = []
    for rank in range(ranks):
        forwards, backwards = _sequences(rank, groups=[micro], ranks=ranks, virtual=virtual)
        orders.append(_in_turn(forwards, backwards, warm=len(forwards)))
    return orders


def one_f_one_b(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run a backward as soon as one is ready, to hold few microbatches (PipeDream-Flush, arXiv 2006.09503)."""
    return interleaved(ranks=ranks, micro=micro, virtual=virtual)


def interleaved(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run 1F1B over several stages per rank, one group of microbatches at a time (Narayanan et al., arXiv 2104.04473).

    The paper (2021) requires groups of exactly `ranks` microbatches; here they may be larger, so any number works.
    """
    groups = _groups(micro, ranks=ranks)
    orders = []
    for rank in range(ranks):
        forwards, backwards = _sequences(rank, groups=groups, ranks=ranks, virtual=virtual)
        after = (ranks - 1 - rank) * (2 if virtual > 1 else 1)
        orders.append(_in_turn(forwards, backwards, warm=(virtual - 1) * groups[0] + after))
    return orders


def zero_bubble(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run (interleaved) 1F1B with delayed weight gradients that fill the gaps: ZB-H1.

    Qi et al. 2023, arXiv 2401.10241. Rank r delays them by r microbatches, so no rank holds more than 1F1B's first
    rank.
    """
    orders = interleaved(ranks=ranks, micro=micro, virtual=virtual)
    return [_split(order, put_off=rank) for rank, order in enumerate(orders)]


def _stages(rank: int, *, ranks: int, virtual: int, op: Op) -> list[int]:
    stages = [rank + ranks * chunk for chunk in range(virtual)]
    return stages if op is Op.FORWARD else stages[::-1]


def _groups(micro: int, *, ranks: int) -> list[int]:
    """Return the group sizes, larger ones first: 1F1B's order needs it, since a group waits for the one before."""
    rounds = max(1, micro // ranks)
    each, more = divmod(micro, rounds)
    return [each + (place < more) for place in range(rounds)]


def _sequences(rank: int, *, groups: Sequence[int], ranks: int, virtual: int) -> tuple[Order, Order]:
    """Return a rank's forwards and backwards: each group of microbatches passes all its stages before the next."""
    found: dict[Op, Order] = {Op.FORWARD: [], Op.BACKWARD: []}
    for op, order in found.items():
        start = 0
        for group in groups:
            for stage in _stages(rank, ranks=ranks, virtual=virtual, op=op):
                order += [Action(op=op, stage=stage, microbatch=m) for m in range(start, start + group)]
            start += group
    return found[Op.FORWARD], found[Op.BACKWARD]


def _in_turn(forwards: Order, backwards: Order, *, warm: int) -> Order:
    """Return `warm` forwards, then one forward and one backward in turn, then the remaining backwards."""
    order = forwards[:warm]
    for place, backward in enumerate(backwards):
        order += forwards[warm + place : warm + place + 1]
        order.append(backward)
    return order


def _split(order: Order, *, put_off: int) -> Order:
    found: Order = []
    waiting: list[Action] = []
    for action in order:
        if action.op is Op.FORWARD:
            found.append(action)
            continue
        found.append(Action(op=Op.INPUT, stage=action.stage, microbatch=action.microbatch))
        waiting.append(Action(op=Op.WEIGHT, stage=action.stage, microbatch=action.microbatch))
        if len(waiting) > put_off:
            found.append(waiting.pop(0))
    return found + waiting


def vee(*, ranks: int, virtual: int) -> tuple[int, ...]:
    """Return the rank of each stage: 0 1 2 3 3 2 1 0."""
    assert virtual == 2
    return (*range(ranks), *reversed(range(ranks)))


def zbv(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run zero-bubble V, after the figure of Qi et al. 2024 (arXiv 2405.15362): a fixed pattern, no search.

    No rank holds more than `2 * ranks` activations of its half-size stages, each until its weight gradients are done:
    as much as 1F1B's first rank. The paper frees part of an activation after I; this bound does not use it. If F, I
    and W take equal time and `micro >= 2 * (ranks - 1)`, each rank is idle for `ranks - 1` of them only.
    """
    return [_zbv_order(rank, ranks=ranks, micro=micro) for rank in range(ranks)]


def _zbv_order(rank: int, *, ranks: int, micro: int) -> Order:
    """Return one rank's order. `F0` is a forward on the way down, `W1` a weight gradient on the way up."""
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
