"""The table of schedules by name, with the properties of each.

To add one, write its function in `schedules.py` and add a row here.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.console.formatting import did_you_mean, plural
from paceline.errors import LayoutError
from paceline.schedule import closed_forms
from paceline.schedule.lowering import lower
from paceline.schedule.program import Program
from paceline.schedule.schedules import (
    Order,
    breadth_first,
    gpipe,
    interleaved,
    naive,
    one_f_one_b,
    vee,
    zbv,
    zero_bubble,
)


def loop(*, ranks: int, virtual: int) -> tuple[int, ...]:
    """Return the rank of each stage: 0 1 2 3 0 1 2 3."""
    return tuple(range(ranks)) * virtual


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A pipeline schedule: `orders(ranks=, micro=, virtual=)` returns each rank's computes.

    `makespan` is its closed form; `virtual` is the default number of stages per rank, and `any_virtual` allows other
    numbers; `placement(ranks=, virtual=)` returns the rank of each stage.
    """

    name: str
    orders: Callable[..., list[Order]]
    makespan: closed_forms.Form
    says: str
    paper: str = ""
    virtual: int = 1
    any_virtual: bool = False
    placement: Callable[..., tuple[int, ...]] = loop
    torch_names: tuple[str, ...] = field(default=())


SCHEDULES: dict[str, Schedule] = {
    row.name: row
    for row in (
        Schedule(
            name="naive",
            orders=naive,
            makespan=closed_forms.naive,
            says="one microbatch at a time goes forward and back",
            any_virtual=True,
        ),
        Schedule(
            name="gpipe",
            orders=gpipe,
            makespan=closed_forms.one_after_another,
            says="all forwards, then all backwards",
            paper="arXiv 1811.06965",
            torch_names=("GPipe",),
        ),
        Schedule(
            name="1f1b",
            orders=one_f_one_b,
            makespan=closed_forms.one_after_another,
            says="each backward as soon as possible",
            paper="arXiv 1806.03377, 2006.09503",
            torch_names=("1F1B",),
        ),
        Schedule(
            name="interleaved",
            orders=interleaved,
            makespan=closed_forms.one_after_another,
            says="1F1B over several stages per rank",
            paper="arXiv 2104.04473",
            virtual=2,
            any_virtual=True,
            torch_names=("Interleaved1F1B",),
        ),
        Schedule(
            name="breadth_first",
            orders=breadth_first,
            makespan=closed_forms.one_after_another,
            says="all microbatches through a rank's first stage, then its second, and back",
            paper="arXiv 2211.05953",
            virtual=2,
            any_virtual=True,
            torch_names=("LoopedBFS",),
        ),
        Schedule(
            name="zb_h1",
            orders=zero_bubble,
            makespan=closed_forms.weights_put_off,
            says="1F1B whose weight gradients wait and fill the gaps",
            paper="arXiv 2401.10241",
        ),
        Schedule(
            name="zb_interleaved",
            orders=zero_bubble,
            makespan=closed_forms.weights_put_off,
            says="interleaved 1F1B whose weight gradients wait and fill the gaps",
            paper="arXiv 2401.10241",
            virtual=2,
            any_virtual=True,
            torch_names=("InterleavedZeroBubble",),
        ),
        Schedule(
            name="zbv",
            orders=zbv,
            makespan=closed_forms.vee,
            says="down through the ranks and up again, weight gradients separate",
            paper="arXiv 2405.15362",
            virtual=2,
            placement=vee,
            torch_names=("ZBVZeroBubble",),
        ),
    )
}


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "").removeprefix("schedule")


_KNOWN = {_plain(name): row for row in SCHEDULES.values() for name in (row.name, *row.torch_names)}


def schedule_named(name: str) -> Schedule:
    """Return the schedule of this name, ignoring case, `-` and `_`.

    It also accepts torch's spellings (`Interleaved1F1B`, `ScheduleGPipe`).

    Raises:
        LayoutError: no schedule has that name.
    """
    if _plain(name) in _KNOWN:
        return _KNOWN[_plain(name)]
    names = [*SCHEDULES, *(other for row in SCHEDULES.values() for other in row.torch_names)]
    raise LayoutError(
        f"{name!r} is not a pipeline schedule.",
        cause=did_you_mean(name, names),
        hint=f"schedule={' | '.join(SCHEDULES)}, or a text file with your own",
    )


def build(name: str, *, ranks: int, micro: int, virtual: int | None = None) -> Program:
    """Return the program of schedule `name` on `ranks` ranks for `micro` microbatches, any number of either.

    Each rank holds `virtual` stages; the default is the schedule's own number.

    Raises:
        LayoutError: no such schedule, or it does not support these numbers.
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
    for word, value in (("ranks", ranks), ("microbatches", micro), ("stages per rank", virtual)):
        if value < 1:
            raise LayoutError(f"schedule {schedule.name!r} with {value} {word}: at least 1 is needed.")
    if virtual != schedule.virtual and not schedule.any_virtual:
        raise LayoutError(
            f"schedule {schedule.name!r} has {plural(schedule.virtual, 'stage')} on each rank, "
            f"but {virtual} are requested.",
            cause="interleaved, breadth_first and zb_interleaved take any number of stages per rank",
            hint=f"--layout pp={ranks},schedule=interleaved,virtual={virtual}",
        )
