"""The schedules: each a function that gives every rank's *compute* order, and nothing else.

To add one: a function here, a row in `table.py`. Sends, checks, bubble, memory, picture and runtime come free.
"""

from collections.abc import Sequence

from paceline.schedule.program import Action, Op

Order = list[Action]


def gpipe(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """All forwards, then all backwards (Huang et al. 2019, arXiv 1811.06965)."""
    return [
        _phases(forwards=_all(Op.FORWARD, rank, micro), backwards=_all(Op.BACKWARD, rank, micro), warm=micro)
        for rank in range(ranks)
    ]


def one_f_one_b(*, ranks: int, micro: int, virtual: int) -> list[Order]:
    """A backward as soon as there is one: at most `ranks - rank` microbatches are held (arXiv 1806.03377, 2006.09503)."""
    return [
        _phases(forwards=_all(Op.FORWARD, rank, micro), backwards=_all(Op.BACKWARD, rank, micro), warm=ranks - 1 - rank)
        for rank in range(ranks)
    ]


def _all(op: Op, stage: int, micro: int) -> Order:
    return [Action(op=op, stage=stage, microbatch=m) for m in range(micro)]


def _phases(*, forwards: Sequence[Action], backwards: Sequence[Action], warm: int) -> Order:
    """`warm` forwards, then forward and backward in turn, then the backwards that are left."""
    warm = min(warm, len(forwards))
    order = list(forwards[:warm])
    for place, backward in enumerate(backwards):
        order += forwards[warm + place : warm + place + 1]
        order.append(backward)
    return order
