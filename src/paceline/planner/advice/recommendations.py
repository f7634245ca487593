"""Build the advice of a plan: the memory case, the best layout of each family, the recommended one, and why."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from paceline.console.formatting import format_precise_duration, format_size, plural, price_of_steps
from paceline.planner.advice.explanations import (
    explain_misfit,
    explain_missing_family,
    explain_recommended,
    explain_simpler,
    explain_slower,
    find_bottlenecks,
    free_memory_text,
    no_layout_fits_error,
)
from paceline.planner.advice.memory_case import MemoryCase, find_memory_case
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate, MeasuredTime
from paceline.planner.cost.forecast_margins import is_tie
from paceline.planner.cost.layout_candidate import FAMILIES
from paceline.planner.search.branch_and_bound import search, sort_key
from paceline.planner.search.layout_simplicity import find_simpler_candidate, find_simplest_tie
from paceline.planner.search.least_memory import find_least_memory
from paceline.planner.search.neighbors import Change, cheapest_changes
from paceline.planner.search.search_space import SearchSpace


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """A layout in a plan."""

    family: str
    estimate: Estimate
    time_explanation: str = ""
    """The text on the step time for `explanation`; if empty, `explanation` lists the largest parts of the step time."""
    changes: tuple[Change, ...] = ()
    """Changes of the layout, each of which makes it fit; empty if the layout fits."""
    replayed: bool = False
    """True if a replay counted the memory."""
    refused: str = ""
    """The reason if the job refused the layout after the search; else empty."""

    @property
    def fits(self) -> bool:
        """True if the job did not refuse the layout, and no rank needs more memory than it has."""
        return self.estimate.fits and not self.refused

    @property
    def verdict(self) -> str:
        """The verdict on the layout: `fits`, `tight`, `refused` or `does not fit`."""
        return verdict_text(fits=self.fits, tight=self.estimate.is_tight, refused=self.refused)

    @property
    def explanation(self) -> str:
        """The parts of the step time and the free memory or, if the layout is not possible, the reason."""
        if self.refused or not self.fits:
            return self.refused or explain_misfit(self.estimate)
        return f"{self.time_explanation or explain_recommended(self.estimate)}; {free_memory_text(self.estimate)}"

    def as_json(self) -> dict[str, Any]:
        """Return the stable keys `layout`, `fits`, `peak_bytes`, `parts`, `step_seconds`, `why`; others may change."""
        estimate = self.estimate
        return {
            "layout": estimate.layout,
            "fits": self.fits,
            "tight": self.estimate.is_tight,
            "peak_bytes": round(estimate.peak_bytes),
            "parts": {name: round(value) for name, value in estimate.memory.parts.items()},
            "step_seconds": estimate.step_seconds,
            "samples_per_second_per_device": estimate.samples_per_second_per_device,
            "tokens_per_second_per_device": estimate.tokens_per_second_per_device,
            "mfu": estimate.mfu,
            "timed": None if estimate.measured_time is None else asdict(estimate.measured_time),
            "why": self.explanation,
            "family": self.family,
            "replayed": self.replayed,
            "refused": self.refused,
            "seconds": estimate.seconds.parts,
            "microbatches": estimate.num_micro,
            "settings": estimate.settings,
            "host_bytes": round(estimate.memory.host_bytes),
            "price": estimate.price,
            "changes": [
                {"change": change.description, "step_seconds": change.estimate.step_seconds}
                for change in self.changes
                if not self.fits
            ],
        }


def verdict_text(*, fits: bool, tight: bool, refused: str) -> str:
    """Return the verdict on a layout; `tight` means that the forecast cannot tell whether it fits."""
    return "refused" if refused else "fits" if fits else "tight" if tight else "does not fit"


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advice of a plan."""

    case: MemoryCase
    """What fits on one device: everything, only single layers, or not even every layer."""
    rows: tuple[PlanRow, ...]
    """The best layout of each family: the recommended one, then the others that fit, then those that do not fit."""
    limits: tuple[str, ...]
    """Lines on what limits the step time of the recommended layout."""
    missing: tuple[str, ...] = ()
    """A line for each family that has no layout, with the reason."""
    not_replayed_reason: str = "the forecast is analytical only"
    """The reason to state if the recommended layout was not replayed."""
    tie: Estimate | None = None
    """The fastest layout, if a simpler one that ties with it is recommended; else None."""

    @property
    def recommended(self) -> Estimate:
        """The fastest estimate that fits, or a simpler one that ties with it."""
        return self.rows[0].estimate

    def as_json(self) -> dict[str, Any]:
        """Return the stable keys `case`, `recommended`, `plans`; others may change."""
        is_replayed = self.rows[0].replayed
        return {
            "case": self.case.number,
            "recommended": self.recommended.layout,
            "replayed": is_replayed,
            "unreplayed": "" if is_replayed else self.not_replayed_reason,
            "tie": None if self.tie is None else {"layout": self.tie.layout, "step_seconds": self.tie.step_seconds},
            "plans": [row.as_json() for row in self.rows],
            "limits": list(self.limits),
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of plain text."""
        best = self.recommended
        yield f"case {self.case.number}: {self.case.description}"
        replay_note = "" if self.rows[0].replayed else f", NOT REPLAYED ({self.not_replayed_reason})"
        yield f"recommended{replay_note}: --layout {best.layout}" + "".join(
            f" --{k} {v}" for k, v in best.settings.items()
        )
        yield f"  {self.rows[0].explanation}"
        yield from (f"  {line}" for line in self.limits)
        yield "the best of each family:"
        yield from row_lines(self.rows)
        yield from (f"  {line}" for line in self.missing)


def row_lines(rows: Sequence[PlanRow]) -> Iterator[str]:
    """Yield a table with one line per row, and under each line its explanation."""
    if not rows:
        return
    table = [_header_cells(rows[0].estimate), *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table
    ]
    yield f"  {lines[0]}"
    for row, line in zip(rows, lines[1:], strict=True):
        yield f"  {line}"
        yield f"    {row.explanation}"
        yield from (f"    {change}" for change in row.changes if not row.fits)


def _header_cells(estimate: Estimate) -> tuple[str, ...]:
    price = "" if estimate.price is None else "1,000 steps"
    return (
        "layout",
        "",
        "peak",
        "step",
        f"{throughput_text(estimate)[0]} per {'GPU' if estimate.is_gpu else 'rank'}",
        "MFU",
        price,
    )


def _cells(row: PlanRow) -> tuple[str, ...]:
    estimate = row.estimate
    return (
        str(estimate.candidate),
        row.verdict,
        format_size(round(estimate.peak_bytes)) + " (replayed)" * row.replayed,
        format_precise_duration(estimate.step_seconds) + _timing_note(estimate.measured_time),
        throughput_text(estimate)[1],
        f"{estimate.mfu:.1%}",
        "" if estimate.price is None else price_of_steps(estimate.price, estimate.currency),
    )


def throughput_text(estimate: Estimate) -> tuple[str, str]:
    """Return the unit and the value of a device's throughput: in tokens, or in samples if samples have no length."""
    tokens = estimate.tokens_per_second_per_device
    rate = estimate.samples_per_second_per_device if tokens is None else tokens
    return "samples/s" if tokens is None else "tokens/s", f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def advise(cost_model: CostModel, *, grid: SearchSpace | None = None) -> Advice:
    """Search for the best layouts and explain the result.

    For each layout that ties with the fastest, also search for a simpler one, with fewer options or axes.

    Raises:
        LayoutError: no layout fits. The error names the layout that needs least memory, and what would make it fit.
    """
    grid = grid or SearchSpace()
    best = [*search(cost_model, grid=grid).best.values()]
    ties = [estimate for estimate in best if is_tie(estimate, min(best, key=sort_key))]
    simpler_estimates = [find_simpler_candidate(cost_model, estimate, grid=grid) for estimate in ties]
    return build_advice(cost_model, [*best, *filter(None, simpler_estimates)], grid=grid)


def build_advice(cost_model: CostModel, estimates: Iterable[Estimate], *, grid: SearchSpace | None = None) -> Advice:
    """Return the advice for these estimates, which all fit.

    Families without an estimate get the layout that needs least memory, or a line that explains why they have none.

    Raises:
        LayoutError: there is no estimate. The error names the layout that needs least memory, and what would make it
            fit.
    """
    grid = grid or SearchSpace()
    ranked = sorted(estimates, key=sort_key)
    if not ranked:
        nearest = find_least_memory(cost_model, grid=grid)
        raise no_layout_fits_error(cost_model, grid, nearest)
    first, fastest = find_simplest_tie(ranked), ranked[0]
    best = {first.candidate.family: first}
    for estimate in ranked:
        best.setdefault(estimate.candidate.family, estimate)
    rows = list(_build_rows([*best.values()], fastest))
    missing = []
    for family in FAMILIES:
        if family in best:
            continue
        misfit = find_least_memory(cost_model, grid=grid, family=family)
        if misfit is not None and not misfit.fits:
            rows.append(build_plan_row(cost_model, misfit, grid=grid))
        elif misfit is None and (line := explain_missing_family(family, cost_model)) != "":
            missing.append(line)
    return Advice(
        case=find_memory_case(cost_model, grid=grid),
        rows=tuple(rows),
        limits=find_bottlenecks(cost_model, rows[0].estimate, grid),
        missing=tuple(missing),
        tie=None if first is fastest else fastest,
    )


def _timing_note(measured_time: MeasuredTime | None) -> str:
    """Return the note that a step time was measured, with its relative spread if that is known; empty if it was not."""
    if measured_time is None:
        return ""
    return (
        f" timed (± {measured_time.spread:.0%})"
        if measured_time.spread
        else f" timed ({plural(measured_time.steps, 'step')} only)"
    )


def _build_rows(best: Sequence[Estimate], fastest: Estimate) -> Iterator[PlanRow]:
    """Yield the rows of the estimates in `best`. The first one is recommended; `fastest` may tie with it."""
    first, *others = best
    explanation = explain_recommended(first) if first is fastest else explain_simpler(first, fastest)
    yield PlanRow(family=first.candidate.family, estimate=first, time_explanation=explanation)
    yield from (
        PlanRow(family=estimate.candidate.family, estimate=estimate, time_explanation=explain_slower(estimate, first))
        for estimate in others
    )


def build_plan_row(cost_model: CostModel, estimate: Estimate, *, grid: SearchSpace | None = None) -> PlanRow:
    """Return the row of an estimate. If the layout does not fit, the row has changes that would make it fit."""
    grid = grid or SearchSpace()
    family = estimate.candidate.family
    if estimate.fits:
        return PlanRow(family=family, estimate=estimate, time_explanation=explain_recommended(estimate))
    changes = cheapest_changes(cost_model, estimate, grid=grid)
    return PlanRow(family=family, estimate=estimate, changes=changes)
