"""Layouts that a user names, each judged on a cluster, and what is different between them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.errors import LayoutError, PacelineError
from paceline.plan.advice import Row, judged, row_lines
from paceline.plan.cases import Case, case_of
from paceline.plan.differ import differences
from paceline.plan.estimate import Estimate
from paceline.plan.forecast import Forecast
from paceline.plan.named import estimate_named
from paceline.plan.search import key_of
from paceline.plan.timed import retimed


@dataclass(frozen=True, kw_only=True)
class Judged:
    """`rows` are of those that can be had, in the order in which they were named; `missing` says why of the others."""

    case: Case
    rows: tuple[Row, ...]
    missing: Mapping[str, str]
    limits: tuple[str, ...] = ()

    @property
    def recommended(self) -> Estimate | None:
        """The quickest of those that fit."""
        return min((row.estimate for row in self.rows if row.fits), key=key_of, default=None)

    @property
    def differences(self) -> list[tuple[str, ...]]:
        """Of each against the first."""
        return [differences(self.rows[0].estimate, row.estimate) for row in self.rows[1:]]

    def as_json(self) -> dict[str, Any]:
        """The keys of a plan, and `differences`."""
        best = self.recommended
        lost = [{"layout": name, "fits": False, "why": why} for name, why in self.missing.items()]
        return {
            "case": self.case.number,
            "recommended": None if best is None else best.layout,
            "plans": [*(row.as_json() for row in self.rows), *lost],
            "limits": [],
            "differences": [list(lines) for lines in self.differences],
        }

    def lines(self) -> Iterator[str]:
        """As plain text."""
        yield f"case {self.case.number}: {self.case.says}"
        yield from row_lines(self.rows)
        yield from (f"  {name}: {why}" for name, why in self.missing.items())
        best = self.recommended
        if best is not None and len(self.rows) > 1:
            yield f"quickest that fits: --layout {best.layout}" + "".join(
                f" --{k} {v}" for k, v in best.settings.items()
            )
        for title, *said in self.differences:
            yield title
            yield from (f"  {line}" for line in said)


def judge(
    forecast: Forecast,
    layouts: Sequence[str],
    *,
    micro_batch_size: int | None = None,
    timed: Sequence[Estimate] = (),
) -> Judged:
    """Each with its microbatches as given, or as is quickest for it; with the seconds of those that were `timed`.

    Raises:
        PacelineError: none of them can be had; what is wrong with the first.
    """
    named, missing = list[Estimate](), dict[str, PacelineError]()
    for text in layouts:
        try:
            named.append(estimate_named(forecast, text, micro_batch_size=micro_batch_size))
        except PacelineError as error:
            missing[text] = next(iter(getattr(error, "problems", [error])))
    if not named and missing:
        first = next(iter(missing.values()))
        raise LayoutError(first.what, cause=first.cause, hint=first.hint)
    found = retimed(named, {str(one.candidate): one.timed for one in timed if one.timed is not None})
    by_name = {str(one.candidate): one for one in found}
    rows = tuple(judged(forecast, by_name[str(one.candidate)]) for one in named)
    return Judged(case=case_of(forecast), rows=rows, missing={text: error.what for text, error in missing.items()})
