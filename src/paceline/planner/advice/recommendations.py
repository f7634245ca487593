"""The advice of a plan: the memory case, the best layout of each family, the recommended one, and why."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.console.formatting import format_precise_duration, format_size, plural, price_of_steps
from paceline.planner.advice.explanations import (
    bottlenecks,
    left_of,
    no_candidate,
    nothing_fits,
    of_misfit,
    of_other,
    of_recommended,
    of_simple,
)
from paceline.planner.advice.memory_breakdown import MemoryCase, case_of
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate, MeasuredTime
from paceline.planner.cost.forecast_margins import is_tie
from paceline.planner.cost.layout_candidate import FAMILIES
from paceline.planner.search.branch_and_bound import key_of, search
from paceline.planner.search.layout_simplicity import simpler, simplest
from paceline.planner.search.least_memory import least_memory
from paceline.planner.search.neighbors import Change, cheapest_changes
from paceline.planner.search.search_space import SearchSpace


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A layout in a plan with an explanation of its time; if it does not fit, `changes` would make it fit.

    `replayed` is True if its memory was counted by a replay, not forecast. `refused` says why it is impossible after
    all.
    """

    family: str
    estimate: Estimate
    why: str = ""
    changes: tuple[Change, ...] = ()
    replayed: bool = False
    refused: str = ""

    @property
    def fits(self) -> bool:
        """True if it is possible and no rank needs more memory than it has."""
        return self.estimate.fits and not self.refused

    @property
    def mark(self) -> str:
        """The row's verdict in one to three words."""
        return mark_of(fits=self.fits, tight=self.estimate.is_tight, refused=self.refused)

    @property
    def says(self) -> str:
        """The explanation of its place in the plan."""
        if self.refused or not self.fits:
            return self.refused or of_misfit(self.estimate)
        return f"{self.why or of_recommended(self.estimate)}; {left_of(self.estimate)}"

    def as_json(self) -> dict[str, Any]:
        """Return the stable keys `layout`, `fits`, `peak_bytes`, `parts`, `step_seconds`, `why`; others may change."""
        found = self.estimate
        return {
            "layout": found.layout,
            "fits": self.fits,
            "tight": self.estimate.is_tight,
            "peak_bytes": round(found.peak_bytes),
            "parts": {name: round(value) for name, value in found.memory.parts.items()},
            "step_seconds": found.step_seconds,
            "samples_per_second_per_device": found.samples_per_second_per_device,
            "tokens_per_second_per_device": found.tokens_per_second_per_device,
            "mfu": found.mfu,
            "timed": None if found.timed is None else asdict(found.timed),
            "why": self.says,
            "family": self.family,
            "replayed": self.replayed,
            "refused": self.refused,
            "seconds": found.seconds.parts,
            "microbatches": found.num_micro,
            "settings": found.settings,
            "host_bytes": round(found.memory.host_bytes),
            "price": found.price,
            "changes": [
                {"change": change.says, "step_seconds": change.estimate.step_seconds}
                for change in self.changes
                if not self.fits
            ],
        }


def mark_of(*, fits: bool, tight: bool, refused: str) -> str:
    """Return the word for a row; `tight` means that the forecast cannot tell if it fits."""
    return "refused" if refused else "fits" if fits else "tight" if tight else "does not fit"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advice of a plan: `rows` are the best of each family, those that fit first; `missing` explains the rest.

    If the recommended one was not replayed, `unreplayed` says why; if it ties with a faster one, that is `tie`.
    """

    case: MemoryCase
    rows: tuple[PlanRow, ...]
    limits: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unreplayed: str = "the forecast is analytical only"
    tie: Estimate | None = None

    @property
    def recommended(self) -> Estimate:
        """The fastest that fits, or a simpler one that ties with it."""
        return self.rows[0].estimate

    def as_json(self) -> dict[str, Any]:
        """Return the stable keys `case`, `recommended`, `plans`; others may change."""
        is_replayed = self.rows[0].replayed
        return {
            "case": self.case.number,
            "recommended": self.recommended.layout,
            "replayed": is_replayed,
            "unreplayed": "" if is_replayed else self.unreplayed,
            "tie": None if self.tie is None else {"layout": self.tie.layout, "step_seconds": self.tie.step_seconds},
            "plans": [row.as_json() for row in self.rows],
            "limits": list(self.limits),
        }

    def lines(self) -> Iterator[str]:
        """Yield one screen of plain text."""
        best = self.recommended
        yield f"case {self.case.number}: {self.case.says}"
        doubt = "" if self.rows[0].replayed else f", NOT REPLAYED ({self.unreplayed})"
        yield f"recommended{doubt}: --layout {best.layout}" + "".join(f" --{k} {v}" for k, v in best.settings.items())
        yield f"  {self.rows[0].says}"
        yield from (f"  {line}" for line in self.limits)
        yield "the best of each family:"
        yield from row_lines(self.rows)
        yield from (f"  {line}" for line in self.missing)


def row_lines(rows: Sequence[PlanRow]) -> Iterator[str]:
    """Yield a table with one line per row, and under each line its explanation."""
    if not rows:
        return
    table = [_title(rows[0].estimate), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(own, widths, strict=True)).rstrip() for own in table]
    yield f"  {lines[0]}"
    for row, line in zip(rows, lines[1:], strict=True):
        yield f"  {line}"
        yield f"    {row.says}"
        yield from (f"    {change}" for change in row.changes if not row.fits)


def _title(estimate: Estimate) -> tuple[str, ...]:
    price = "" if estimate.price is None else "1,000 steps"
    return (
        "layout",
        "",
        "peak",
        "step",
        f"{rate_of(estimate)[0]} per {'GPU' if estimate.is_gpu else 'rank'}",
        "MFU",
        price,
    )


def _cells(row: PlanRow) -> tuple[str, ...]:
    found = row.estimate
    return (
        str(found.candidate),
        row.mark,
        format_size(round(found.peak_bytes)) + " (replayed)" * row.replayed,
        format_precise_duration(found.step_seconds) + _as_found(found.timed),
        rate_of(found)[1],
        f"{found.mfu:.1%}",
        "" if found.price is None else price_of_steps(found.price, found.currency),
    )


def rate_of(estimate: Estimate) -> tuple[str, str]:
    """Return the unit and the value of a device's throughput: tokens, or samples if these have no length."""
    tokens = estimate.tokens_per_second_per_device
    rate = estimate.samples_per_second_per_device if tokens is None else tokens
    return "samples/s" if tokens is None else "tokens/s", f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def advise(forecast: CostModel, *, grid: SearchSpace | None = None) -> Advice:
    """Search the layouts and explain the result.

    Layouts that tie with the fastest are searched again with fewer options and axes.

    Raises:
        LayoutError: no layout fits; it names the nearest, and what would make it fit.
    """
    grid = grid or SearchSpace()
    best = [*search(forecast, grid=grid).best.values()]
    alike = [one for one in best if is_tie(one, min(best, key=key_of))]
    plain = [simpler(forecast, one, grid=grid) for one in alike]
    return advice_of(forecast, [*best, *(one for one in plain if one is not None)], grid=grid)


def advice_of(forecast: CostModel, estimates: Iterable[Estimate], *, grid: SearchSpace | None = None) -> Advice:
    """Return the advice for these estimates, which all fit: the best of each family, and the recommended one.

    Raises:
        LayoutError: there is no estimate; it names the nearest layout, and what would make it fit.
    """
    grid = grid or SearchSpace()
    every = sorted(estimates, key=key_of)
    if not every:
        nearest = least_memory(forecast, grid=grid)
        raise nothing_fits(forecast, grid, nearest)
    first, quickest = simplest(every), every[0]
    best = {first.candidate.family: first}
    for estimate in every:
        best.setdefault(estimate.candidate.family, estimate)
    rows = list(_ranked([*best.values()], quickest))
    missing = []
    for family in FAMILIES:
        if family in best:
            continue
        misfit = least_memory(forecast, grid=grid, family=family)
        if misfit is not None and not misfit.fits:
            rows.append(plan_row(forecast, misfit, grid=grid))
        elif misfit is None and (line := no_candidate(family, forecast)) != "":
            missing.append(line)
    return Advice(
        case=case_of(forecast, grid=grid),
        rows=tuple(rows),
        limits=bottlenecks(forecast, rows[0].estimate, grid),
        missing=tuple(missing),
        tie=None if first is quickest else quickest,
    )


def _as_found(timed: MeasuredTime | None) -> str:
    if timed is None:
        return ""
    return f" timed (± {timed.spread:.0%})" if timed.spread else f" timed ({plural(timed.steps, 'step')} only)"


def _ranked(best: Sequence[Estimate], quickest: Estimate) -> Iterator[PlanRow]:
    """Yield the rows, the recommended one first, which `best` begins with; then the others, faster ones first."""
    first, *others = best
    why = of_recommended(first) if first is quickest else of_simple(first, quickest)
    yield PlanRow(family=first.candidate.family, estimate=first, why=why)
    yield from (PlanRow(family=one.candidate.family, estimate=one, why=of_other(one, first)) for one in others)


def plan_row(forecast: CostModel, estimate: Estimate, *, grid: SearchSpace | None = None) -> PlanRow:
    """Return the row of any estimate, e.g. of a layout that a user named; with changes that would make it fit."""
    grid = grid or SearchSpace()
    family = estimate.candidate.family
    if estimate.fits:
        return PlanRow(family=family, estimate=estimate, why=of_recommended(estimate))
    changes = cheapest_changes(forecast, estimate, grid=grid)
    return PlanRow(family=family, estimate=estimate, changes=changes)
