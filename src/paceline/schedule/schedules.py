"""Build the compute orders of the built-in schedules: each function returns one order per rank, without messages.

To add a schedule, write a function here and add an entry to `SCHEDULES` in `registry.py`. Sends, checks, bubble, memory
use, picture and runtime are derived from the orders. There are `micro` microbatches. Each rank has `virtual` stages. By
default, stage s is on rank s mod ranks.
"""

from collections import Counter
from collections.abc import Sequence

from paceline.schedule.program import Action, Op

Order = list[Action]  # the computes of one rank


def naive(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run all forwards and backwards of one microbatch before those of the next: no two ranks compute at once."""
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
    """Run all microbatches in a rank's first stage, then all in its second stage, and so on (arXiv 2211.05953).

    The backwards follow in the same way, from the last stage to the first.
    """
    orders = []
    for rank in range(ranks):
        forwards, backwards = _forwards_and_backwards(rank, groups=[micro], ranks=ranks, virtual=virtual)
        orders.append(_alternate(forwards, backwards, num_warmup=len(forwards)))
    return orders


def one_f_one_b(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run each backward as soon as possible, so that few activations exist (PipeDream-Flush, arXiv 2006.09503)."""
    return interleaved(ranks=ranks, micro=micro, virtual=virtual)


def interleaved(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run 1F1B over several stages per rank, one group of microbatches at a time (Narayanan et al., arXiv 2104.04473).

    The paper (2021) requires groups of exactly `ranks` microbatches. Here a group may have more, so that any number of
    microbatches is possible.
    """
    groups = _groups(micro, ranks=ranks)
    orders = []
    for rank in range(ranks):
        forwards, backwards = _forwards_and_backwards(rank, groups=groups, ranks=ranks, virtual=virtual)
        num_until_backward = (ranks - 1 - rank) * (2 if virtual > 1 else 1)
        orders.append(_alternate(forwards, backwards, num_warmup=(virtual - 1) * groups[0] + num_until_backward))
    return orders


def zero_bubble(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run 1F1B or interleaved 1F1B with delayed weight gradients, which fill the gaps: ZB-H1.

    Qi et al. 2023, arXiv 2401.10241. Rank r delays weight gradients by r microbatches. So no rank has more activations
    than the first rank of 1F1B.
    """
    orders = interleaved(ranks=ranks, micro=micro, virtual=virtual)
    return [_delay_weight_gradients(order, delay=rank) for rank, order in enumerate(orders)]


def _stages(rank: int, *, ranks: int, virtual: int, op: Op) -> list[int]:
    stages = [rank + ranks * chunk for chunk in range(virtual)]
    return stages if op is Op.FORWARD else stages[::-1]


def _groups(micro: int, *, ranks: int) -> list[int]:
    """Return the sizes of the groups of microbatches. They differ by at most 1, and the larger groups come first."""
    rounds = max(1, micro // ranks)
    group_size, remainder = divmod(micro, rounds)
    return [group_size + (index < remainder) for index in range(rounds)]


def _forwards_and_backwards(rank: int, *, groups: Sequence[int], ranks: int, virtual: int) -> tuple[Order, Order]:
    """Return a rank's forwards and backwards. Each group of microbatches passes all stages of the rank in order."""
    orders: dict[Op, Order] = {Op.FORWARD: [], Op.BACKWARD: []}
    for op, order in orders.items():
        start = 0
        for group in groups:
            for stage in _stages(rank, ranks=ranks, virtual=virtual, op=op):
                order += [Action(op=op, stage=stage, microbatch=m) for m in range(start, start + group)]
            start += group
    return orders[Op.FORWARD], orders[Op.BACKWARD]


def _alternate(forwards: Order, backwards: Order, *, num_warmup: int) -> Order:
    """Return `num_warmup` forwards, then forwards and backwards alternately, then the remaining backwards."""
    order = forwards[:num_warmup]
    for index, backward in enumerate(backwards):
        order += forwards[num_warmup + index : num_warmup + index + 1]
        order.append(backward)
    return order


def _delay_weight_gradients(order: Order, *, delay: int) -> Order:
    """Split each backward into an input part and a weight part, and delay the weight parts.

    Between the two parts of one backward, the input parts of `delay` other backwards run. The remaining
    weight parts run at the end.
    """
    delayed: Order = []
    pending: list[Action] = []
    for action in order:
        if action.op is Op.FORWARD:
            delayed.append(action)
            continue
        delayed.append(Action(op=Op.BACKWARD_INPUT, stage=action.stage, microbatch=action.microbatch))
        pending.append(Action(op=Op.BACKWARD_WEIGHT, stage=action.stage, microbatch=action.microbatch))
        if len(pending) > delay:
            delayed.append(pending.pop(0))
    return delayed + pending


def v_placement(*, ranks: int, virtual: int) -> tuple[int, ...]:
    """Return the rank of each stage, e.g. 0 1 2 3 3 2 1 0 for 4 ranks."""
    assert virtual == 2
    return (*range(ranks), *reversed(range(ranks)))


def zbv(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """Run zero-bubble V by a fixed pattern, without a search, as in the figure of Qi et al. 2024 (arXiv 2405.15362).

    No rank has more than `2 * ranks` activations. A stage has half the layers of a 1F1B stage, so this is as much as on
    the first rank of 1F1B. An activation is kept until its weight gradients are computed; the paper frees a part of it
    after I. If F, I and W take the same time t and `micro >= 2 * (ranks - 1)`, each rank is idle for only
    `(ranks - 1) * t`.
    """
    return [_zbv_order(rank, ranks=ranks, micro=micro) for rank in range(ranks)]


def _zbv_order(rank: int, *, ranks: int, micro: int) -> Order:
    """Return one rank's order. In its pattern, `F0` is F in the rank's first stage, and `W1` is W in its second."""
    num_done: Counter[str] = Counter()
    order: Order = []

    def append(words: str, times: int) -> None:
        """Append these actions `times` times, each for its next microbatch. Skip those without one."""
        for word in words.split() * times:
            if num_done[word] < micro:
                stage = rank if word.endswith("0") else 2 * ranks - 1 - rank
                order.append(Action(op=Op(word[0]), stage=stage, microbatch=num_done[word]))
                num_done[word] += 1

    append("F0", 2 * (ranks - rank) - 1)  # until the first microbatch reaches the rank's second stage
    append("F1 F0", rank)
    append("F1 I1 W1", ranks - rank)  # until the first gradient reaches the rank's first stage
    while min(num_done["F0"], num_done["F1"]) < micro:
        append("F0 I0 W0 F1 I1 W1", 1)
    append("I0 I1", rank)  # first the gradients that other ranks wait for
    append("I0 W0", ranks - rank)
    for kind in ("I0", "I1", "W0", "W1"):
        append(kind, micro)
    return order
