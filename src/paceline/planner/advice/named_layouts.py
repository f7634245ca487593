"""Layouts that a user names, each judged on a cluster, and the differences between them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import LayoutError, PacelineError
from paceline.planner.advice.explanations import of_simple
from paceline.planner.advice.layout_diff import layout_differences
from paceline.planner.advice.memory_breakdown import MemoryCase, case_of
from paceline.planner.advice.recommendations import PlanRow, plan_row, row_lines
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.search.branch_and_bound import key_of
from paceline.planner.search.evaluate_named_layout import estimate_named
from paceline.planner.search.layout_simplicity import simplest
from paceline.planner.search.shortlist import retimed


@dataclass(frozen=True, kw_only=True)
class NamedLayouts:
    """The judgement of named layouts: `rows` in the order of the names; `missing` says why the others are impossible.

    `names` are the rows' as they were typed. If the recommended one was not replayed, `unreplayed` says why.
    """

    case: MemoryCase
    rows: tuple[PlanRow, ...]
    names: tuple[str, ...]
    missing: Mapping[str, str]
    limits: tuple[str, ...] = ()
    unreplayed: str = "the forecast is analytical only"

    @property
    def first(self) -> PlanRow | None:
        """The recommended row: the fastest of those that fit, or the simplest that ties with it."""
        fit = {row.estimate.candidate: row for row in self.rows if row.fits}
        return fit[simplest([row.estimate for row in fit.values()]).candidate] if fit else None

    @property
    def recommended(self) -> Estimate | None:
        """The estimate of the recommended row."""
        return None if self.first is None else self.first.estimate

    @property
    def tie(self) -> Estimate | None:
        """The fastest that fits, if a simpler one that ties with it is recommended; else None."""
        quickest = min((row.estimate for row in self.rows if row.fits), key=key_of, default=None)
        return None if quickest == self.recommended else quickest

    @property
    def differences(self) -> list[tuple[str, ...]]:
        """The differences of each row from the first."""
        return [layout_differences(self.rows[0].estimate, row.estimate) for row in self.rows[1:]]

    def as_json(self) -> dict[str, Any]:
        """Return the keys of a plan, and `differences`."""
        best, first, tie = self.recommended, self.first, self.tie
        is_replayed = first is not None and first.replayed
        lost = [{"layout": name, "fits": False, "why": why} for name, why in self.missing.items()]
        return {
            "case": self.case.number,
            "recommended": None if best is None else best.layout,
            "replayed": is_replayed,
            "unreplayed": "" if is_replayed or first is None else self.unreplayed,
            "tie": None if tie is None else {"layout": tie.layout, "step_seconds": tie.step_seconds},
            "plans": [*(row.as_json() for row in self.rows), *lost],
            "limits": [],
            "differences": [list(lines) for lines in self.differences],
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of plain text."""
        yield f"case {self.case.number}: {self.case.says}"
        yield from row_lines(self.rows)
        yield from (f"  {name}: {why}" for name, why in self.missing.items())
        if (first := self.first) is not None:
            best = first.estimate
            doubt = "" if first.replayed else f", NOT REPLAYED ({self.unreplayed})"
            typed = "".join(f" --{name} {value}" for name, value in best.settings.items())
            if len(self.rows) > 1 or doubt:
                yield f"fastest that fits{doubt}: --layout {best.layout}{typed}"
            if self.tie is not None:
                yield f"  {of_simple(best, self.tie)}"
        for title, *said in self.differences:
            yield title
            yield from (f"  {line}" for line in said)


def judge_asked_layouts(
    forecast: CostModel,
    layouts: Sequence[str],
    *,
    micro_batch_size: int | None = None,
    timed: Sequence[Estimate] = (),
    most: Mapping[str, int] | None = None,
) -> NamedLayouts:
    """Return the judgement of each layout, with its given microbatch size or the fastest for it.

    Layouts that were `timed` have their measured seconds. `most` limits the samples of a microbatch for some layouts.

    Raises:
        PacelineError: no layout is possible; the error is that of the first.
    """
    named, missing = dict[str, Estimate](), dict[str, PacelineError]()
    for text in layouts:
        try:
            largest = (most or {}).get(text)
            named[text] = estimate_named(forecast, text, micro_batch_size=micro_batch_size, most=largest)
        except PacelineError as error:
            missing[text] = next(iter(getattr(error, "problems", [error])))
    if not named and missing:
        first = next(iter(missing.values()))
        raise LayoutError(first.what, cause=first.cause, hint=first.hint)
    found = retimed([*named.values()], {str(one.candidate): one.timed for one in timed if one.timed is not None})
    by_name = {str(one.candidate): one for one in found}
    rows = tuple(plan_row(forecast, by_name[str(one.candidate)]) for one in named.values())
    lost = {text: error.what for text, error in missing.items()}
    return NamedLayouts(case=case_of(forecast), rows=rows, names=tuple(named), missing=lost)
