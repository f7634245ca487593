"""Evaluate the layouts that a user names, and describe the differences between them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import LayoutError, PacelineError, list_problems
from paceline.planner.advice.explanations import explain_simpler
from paceline.planner.advice.layout_diff import layout_differences
from paceline.planner.advice.memory_case import MemoryCase, find_memory_case
from paceline.planner.advice.recommendations import PlanRow, build_plan_row, row_lines
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.search.branch_and_bound import sort_key
from paceline.planner.search.evaluate_named_layout import estimate_named
from paceline.planner.search.layout_simplicity import find_simplest_tie
from paceline.planner.search.shortlist import apply_measured_times


@dataclass(frozen=True, kw_only=True)
class NamedLayouts:
    """The layouts that a user named, with their estimates."""

    case: MemoryCase
    rows: tuple[PlanRow, ...]
    """The possible layouts, in the order in which the user named them."""
    names: tuple[str, ...]
    """The layouts of `rows`, as the user typed them."""
    missing: Mapping[str, str]
    """The reason why a layout is impossible, by the text that the user typed."""
    limits: tuple[str, ...] = ()
    """Always empty: bottlenecks are only described for a plan that a search made."""
    not_replayed_reason: str = "the forecast is analytical only"
    """The reason to state if the recommended layout was not replayed."""

    @property
    def recommended_row(self) -> PlanRow | None:
        """The recommended row: the fastest that fits or, if several tie with it, the simplest of them."""
        fitting = {row.estimate.candidate: row for row in self.rows if row.fits}
        return fitting[find_simplest_tie([row.estimate for row in fitting.values()]).candidate] if fitting else None

    @property
    def recommended(self) -> Estimate | None:
        """The estimate of the recommended row."""
        return None if self.recommended_row is None else self.recommended_row.estimate

    @property
    def tie(self) -> Estimate | None:
        """The fastest estimate that fits, if a simpler one that ties with it is recommended; else None."""
        fastest = min((row.estimate for row in self.rows if row.fits), key=sort_key, default=None)
        return None if fastest == self.recommended else fastest

    @property
    def differences(self) -> list[tuple[str, ...]]:
        """The differences of each row from the first."""
        return [layout_differences(self.rows[0].estimate, row.estimate) for row in self.rows[1:]]

    def as_json(self) -> dict[str, Any]:
        """Return the values under the keys of `Advice.as_json`, and `differences`."""
        best, recommended_row, tie = self.recommended, self.recommended_row, self.tie
        is_replayed = recommended_row is not None and recommended_row.replayed
        impossible = [{"layout": name, "fits": False, "why": why} for name, why in self.missing.items()]
        return {
            "case": self.case.number,
            "recommended": None if best is None else best.layout,
            "replayed": is_replayed,
            "unreplayed": "" if is_replayed or recommended_row is None else self.not_replayed_reason,
            "tie": None if tie is None else {"layout": tie.layout, "step_seconds": tie.step_seconds},
            "plans": [*(row.as_json() for row in self.rows), *impossible],
            "limits": [],
            "differences": [list(lines) for lines in self.differences],
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of plain text."""
        yield f"case {self.case.number}: {self.case.description}"
        yield from row_lines(self.rows)
        yield from (f"  {name}: {why}" for name, why in self.missing.items())
        if (row := self.recommended_row) is not None:
            best = row.estimate
            replay_note = "" if row.replayed else f", NOT REPLAYED ({self.not_replayed_reason})"
            options = "".join(f" --{name} {value}" for name, value in best.settings.items())
            if len(self.rows) > 1 or replay_note:
                yield f"recommended{replay_note}: --layout {best.layout}{options}"
            if self.tie is not None:
                yield f"  {explain_simpler(best, self.tie)}"
        for title, *lines in self.differences:
            yield title
            yield from (f"  {line}" for line in lines)


def evaluate_named_layouts(
    cost_model: CostModel,
    layouts: Sequence[str],
    *,
    micro_batch_size: int | None = None,
    timed_estimates: Sequence[Estimate] = (),
    max_micro_batch_sizes: Mapping[str, int] | None = None,
) -> NamedLayouts:
    """Evaluate each layout, with the given microbatch size or the fastest one.

    Layouts in `timed_estimates` get their measured seconds. `max_micro_batch_sizes` has the largest microbatch size to
    try, by the text of the layout; layouts that it does not name have no limit.

    Raises:
        PacelineError: no layout is possible. The error is that of the first layout.
    """
    estimates, missing = dict[str, Estimate](), dict[str, PacelineError]()
    for text in layouts:
        try:
            max_size = (max_micro_batch_sizes or {}).get(text)
            estimates[text] = estimate_named(
                cost_model, text, micro_batch_size=micro_batch_size, max_micro_batch_size=max_size
            )
        except PacelineError as error:
            missing[text] = list_problems(error)[0]
    if not estimates and missing:
        first = next(iter(missing.values()))
        raise LayoutError(first.what, cause=first.cause, hint=first.hint)
    final_estimates = apply_measured_times(
        [*estimates.values()],
        {
            str(estimate.candidate): estimate.measured_time
            for estimate in timed_estimates
            if estimate.measured_time is not None
        },
    )
    by_name = {str(estimate.candidate): estimate for estimate in final_estimates}
    rows = tuple(build_plan_row(cost_model, by_name[str(estimate.candidate)]) for estimate in estimates.values())
    impossible = {text: error.what for text, error in missing.items()}
    return NamedLayouts(case=find_memory_case(cost_model), rows=rows, names=tuple(estimates), missing=impossible)
