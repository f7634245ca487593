"""A schedule's program by its name."""

from paceline.schedule.lower import lower
from paceline.schedule.orders import gpipe, one_f_one_b
from paceline.schedule.program import Program


def build(name: str, *, ranks: int, micro: int, virtual: int | None = None) -> Program:
    """The program of schedule `name` on `ranks` ranks for `micro` microbatches."""
    function = {"gpipe": gpipe, "1f1b": one_f_one_b}[name]
    orders = function(ranks=ranks, micro=micro, virtual=virtual or 1)
    return lower(orders, name=name, rank_of_stage=range(ranks), num_micro=micro)
