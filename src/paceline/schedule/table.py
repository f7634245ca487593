"""The schedules by name, with what is to be known of each. To add one: its function in `orders.py`, and a row here."""

from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.errors import LayoutError
from paceline.schedule import theory
from paceline.schedule.orders import Order, breadth_first, gpipe, interleaved, naive, one_f_one_b, zero_bubble
from paceline.schedule.vee import vee, zbv
from paceline.spec.words import did_you_mean


def loop(*, ranks: int, virtual: int) -> tuple[int, ...]:
    """Who holds which stage: 0 1 2 3 0 1 2 3."""
    return tuple(range(ranks)) * virtual


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A way to order the work: `orders(ranks=, micro=, virtual=)` gives each rank's computes, `makespan` its closed form.

    `virtual` is how many stages a rank holds if nothing is said; `any_virtual` whether another number may be said.
    """

    name: str
    orders: Callable[..., list[Order]]
    makespan: theory.Form
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
            makespan=theory.naive,
            says="one microbatch at a time goes all the way and back",
            any_virtual=True,
        ),
        Schedule(
            name="gpipe",
            orders=gpipe,
            makespan=theory.one_after_another,
            says="all forwards, then all backwards",
            paper="arXiv 1811.06965",
            torch_names=("GPipe",),
        ),
        Schedule(
            name="1f1b",
            orders=one_f_one_b,
            makespan=theory.one_after_another,
            says="a backward as soon as there is one",
            paper="arXiv 1806.03377, 2006.09503",
            torch_names=("1F1B",),
        ),
        Schedule(
            name="interleaved",
            orders=interleaved,
            makespan=theory.one_after_another,
            says="1F1B over several stages a rank",
            paper="arXiv 2104.04473",
            virtual=2,
            any_virtual=True,
            torch_names=("Interleaved1F1B",),
        ),
        Schedule(
            name="breadth_first",
            orders=breadth_first,
            makespan=theory.one_after_another,
            says="all microbatches through a rank's first stage, then its second, and back",
            paper="arXiv 2211.05953",
            virtual=2,
            any_virtual=True,
            torch_names=("LoopedBFS",),
        ),
        Schedule(
            name="zb_h1",
            orders=zero_bubble,
            makespan=theory.weights_put_off,
            says="1F1B whose weight gradients wait and fill the gaps",
            paper="arXiv 2401.10241",
        ),
        Schedule(
            name="zb_interleaved",
            orders=zero_bubble,
            makespan=theory.weights_put_off,
            says="interleaved 1F1B whose weight gradients wait and fill the gaps",
            paper="arXiv 2401.10241",
            virtual=2,
            any_virtual=True,
            torch_names=("InterleavedZeroBubble",),
        ),
        Schedule(
            name="zbv",
            orders=zbv,
            makespan=theory.vee,
            says="down through the ranks and up again, weight gradients apart",
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
    """Its row; torch's spellings (`Interleaved1F1B`, `ScheduleGPipe`), case, `-` and `_` are taken as they come.

    Raises:
        LayoutError: there is none of that name.
    """
    if _plain(name) in _KNOWN:
        return _KNOWN[_plain(name)]
    names = [*SCHEDULES, *(other for row in SCHEDULES.values() for other in row.torch_names)]
    raise LayoutError(
        f"{name!r} is no pipeline schedule.",
        cause=did_you_mean(name, names),
        hint=f"schedule={' | '.join(SCHEDULES)}, or your own from a text file",
    )
