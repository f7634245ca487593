"""Find and build schedules by name. `SCHEDULES` has the properties of each.

To add a schedule, write its function in `schedules.py` and add an entry to `SCHEDULES`.
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
    v_placement,
    zbv,
    zero_bubble,
)


def loop_placement(*, ranks: int, virtual: int) -> tuple[int, ...]:
    """Return the rank of each stage, e.g. 0 1 2 3 0 1 2 3 for 4 ranks with 2 stages each."""
    return tuple(range(ranks)) * virtual


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A pipeline schedule.

    `orders(ranks=, micro=, virtual=)` returns the compute order of each rank. `makespan` is the closed form of the step
    time. `virtual` is the default number of stages per rank, and `any_virtual` says whether other numbers are possible.
    `placement(ranks=, virtual=)` returns the rank of each stage. `torch_names` are the names in `torch.distributed`.
    """

    name: str
    orders: Callable[..., list[Order]]
    makespan: closed_forms.MakespanForm
    description: str
    paper: str = ""
    virtual: int = 1
    any_virtual: bool = False
    placement: Callable[..., tuple[int, ...]] = loop_placement
    torch_names: tuple[str, ...] = field(default=())


SCHEDULES: dict[str, Schedule] = {
    row.name: row
    for row in (
        Schedule(
            name="naive",
            orders=naive,
            makespan=closed_forms.naive_makespan,
            description="one microbatch at a time goes forward and back",
            any_virtual=True,
        ),
        Schedule(
            name="gpipe",
            orders=gpipe,
            makespan=closed_forms.one_f_one_b_makespan,
            description="all forwards, then all backwards",
            paper="arXiv 1811.06965",
            torch_names=("GPipe",),
        ),
        Schedule(
            name="1f1b",
            orders=one_f_one_b,
            makespan=closed_forms.one_f_one_b_makespan,
            description="each backward as soon as possible",
            paper="arXiv 1806.03377, 2006.09503",
            torch_names=("1F1B",),
        ),
        Schedule(
            name="interleaved",
            orders=interleaved,
            makespan=closed_forms.one_f_one_b_makespan,
            description="1F1B over several stages per rank",
            paper="arXiv 2104.04473",
            virtual=2,
            any_virtual=True,
            torch_names=("Interleaved1F1B",),
        ),
        Schedule(
            name="breadth_first",
            orders=breadth_first,
            makespan=closed_forms.one_f_one_b_makespan,
            description="all microbatches through a rank's first stage, then its second, and back",
            paper="arXiv 2211.05953",
            virtual=2,
            any_virtual=True,
            torch_names=("LoopedBFS",),
        ),
        Schedule(
            name="zb_h1",
            orders=zero_bubble,
            makespan=closed_forms.zero_bubble_makespan,
            description="1F1B whose weight gradients wait and fill the gaps",
            paper="arXiv 2401.10241",
        ),
        Schedule(
            name="zb_interleaved",
            orders=zero_bubble,
            makespan=closed_forms.zero_bubble_makespan,
            description="interleaved 1F1B whose weight gradients wait and fill the gaps",
            paper="arXiv 2401.10241",
            virtual=2,
            any_virtual=True,
            torch_names=("InterleavedZeroBubble",),
        ),
        Schedule(
            name="zbv",
            orders=zbv,
            makespan=closed_forms.zbv_makespan,
            description="down through the ranks and up again, weight gradients separate",
            paper="arXiv 2405.15362",
            virtual=2,
            placement=v_placement,
            torch_names=("ZBVZeroBubble",),
        ),
    )
}


def _normalized_name(name: str) -> str:
    return name.strip().lower().replace("-", "").replace("_", "").removeprefix("schedule")


_SCHEDULES_BY_NAME = {
    _normalized_name(name): row for row in SCHEDULES.values() for name in (row.name, *row.torch_names)
}


def find_schedule(name: str) -> Schedule:
    """Return the schedule of this name. Case, `-` and `_` are ignored.

    Torch's names are accepted too (`Interleaved1F1B`, `ScheduleGPipe`).

    Raises:
        LayoutError: no schedule has that name.
    """
    if _normalized_name(name) in _SCHEDULES_BY_NAME:
        return _SCHEDULES_BY_NAME[_normalized_name(name)]
    names = [*SCHEDULES, *(other for row in SCHEDULES.values() for other in row.torch_names)]
    raise LayoutError(
        f"{name!r} is not a pipeline schedule.",
        cause=did_you_mean(name, names),
        hint=f"schedule={' | '.join(SCHEDULES)}, or a text file with your own",
    )


def build(name: str, *, ranks: int, micro: int, virtual: int | None = None) -> Program:
    """Return the program of schedule `name` on `ranks` ranks for any number `micro` of microbatches.

    Each rank has `virtual` stages. If None, use the schedule's default.

    Raises:
        LayoutError: the schedule does not exist, or does not support these numbers.
    """
    schedule = find_schedule(name)
    stages_per_rank = schedule.virtual if virtual is None else virtual
    _check_numbers(schedule, ranks=ranks, micro=micro, virtual=stages_per_rank)
    return lower(
        schedule.orders(ranks=ranks, micro=micro, virtual=stages_per_rank),
        name=schedule.name,
        rank_of_stage=schedule.placement(ranks=ranks, virtual=stages_per_rank),
        num_micro=micro,
    )


def _check_numbers(schedule: Schedule, *, ranks: int, micro: int, virtual: int) -> None:
    for label, value in (("ranks", ranks), ("microbatches", micro), ("stages per rank", virtual)):
        if value < 1:
            raise LayoutError(f"schedule {schedule.name!r} with {value} {label}: at least 1 is needed.")
    if virtual != schedule.virtual and not schedule.any_virtual:
        raise LayoutError(
            f"schedule {schedule.name!r} has {plural(schedule.virtual, 'stage')} on each rank, "
            f"but {virtual} are requested.",
            cause="of the built-in schedules, only naive, interleaved, breadth_first and zb_interleaved take any "
            "number of stages per rank",
            hint=f"--layout pp={ranks},schedule=interleaved,virtual={virtual}",
        )
