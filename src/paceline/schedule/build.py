"""A schedule's program by its name."""

from paceline.errors import LayoutError
from paceline.schedule.lower import lower
from paceline.schedule.program import Program
from paceline.schedule.table import Schedule, schedule_named
from paceline.spec.words import many


def build(name: str, *, ranks: int, micro: int, virtual: int | None = None) -> Program:
    """The program of schedule `name` on `ranks` ranks for `micro` microbatches, any number of either.

    `virtual` stages lie on each rank; without it as many as the schedule is made for.

    Raises:
        LayoutError: no such schedule, or it can't have these numbers.
    """
    schedule = schedule_named(name)
    each = schedule.virtual if virtual is None else virtual
    _refuse_bad_numbers(schedule, ranks=ranks, micro=micro, virtual=each)
    return lower(
        schedule.orders(ranks=ranks, micro=micro, virtual=each),
        name=schedule.name,
        rank_of_stage=schedule.placement(ranks=ranks, virtual=each),
        num_micro=micro,
    )


def _refuse_bad_numbers(schedule: Schedule, *, ranks: int, micro: int, virtual: int) -> None:
    for word, value in (("ranks", ranks), ("microbatches", micro), ("stages a rank", virtual)):
        if value < 1:
            raise LayoutError(f"schedule {schedule.name!r} with {value} {word}: at least 1 is needed.")
    if virtual != schedule.virtual and not schedule.any_virtual:
        raise LayoutError(
            f"schedule {schedule.name!r} has {many(schedule.virtual, 'stage')} on each rank, {virtual} are asked for.",
            cause="interleaved, breadth_first and zb_interleaved take any number of stages a rank",
            hint=f"--layout pp={ranks},schedule=interleaved,virtual={virtual}",
        )
