"""Layouts that were said and run: errors, noise, order and choice, by the clock and at one pace of the cores."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import mean, median
from typing import Any

PASSES = 2  # runs of each layout, before those that are in doubt run again
CLOSE = 0.05  # to the best
_FEW = 2  # ranks


@dataclass(frozen=True, kw_only=True)
class Row:
    """One layout of a job: what the plan said, and what each real run took; the cores' pace while it was timed for the
    plan, and in each run.
    """

    layout: str
    settings: Mapping[str, str]
    said: float
    spread: float
    steps: int
    taken: Sequence[float]
    pace: float
    paces: Sequence[float]

    @property
    def seconds(self) -> float:
        """Of both runs."""
        return median(self.taken)

    @property
    def error(self) -> float:
        """Of what was said."""
        return self.said / self.seconds - 1

    @property
    def noise(self) -> float:
        """How far the first two runs are apart, of their mean."""
        one, other = self.taken[:PASSES]
        return abs(one - other) / mean((one, other))

    def first(self) -> "Row":
        """By its first two runs alone."""
        return replace(self, taken=self.taken[:PASSES], paces=self.paces[:PASSES])

    def paced(self) -> "Row":
        """What it would be if the cores' pace were always that of the plan."""
        taken = [own * self.pace / pace for own, pace in zip(self.taken, self.paces, strict=True)]
        return replace(self, taken=taken, paces=[self.pace] * len(taken))


def summary(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Errors, noise, order and choice, by number of ranks."""
    for over_line, ranks in sorted({(one["line"], one["ranks"]) for one in found}):
        every = [one for one in found if (one["line"], one["ranks"]) == (over_line, ranks)]
        rows = [[Row(**row) for row in one["rows"]] for one in every]
        where = "over a line" if over_line else "here"
        yield f"{ranks} ranks {where}: {len(every)} jobs, {sum(map(len, rows))} layouts, error of a step's seconds:"
        yield from _judged("by the clock", every, rows)
        yield from _judged("at one pace", every, [[row.paced() for row in own] for own in rows])
        yield f"  planned in {mean(one['plan_seconds'] for one in every):.0f} s on average"
    few = [Row(**row) for one in found if one["ranks"] <= _FEW and not one["line"] for row in one["rows"]]
    if few:
        yield f"1 and 2 ranks here, {len(few)} layouts:"
        yield f"  by the clock: {_told(few)}"
        yield f"  at one pace: {_told(row.paced() for row in few)}"


def _judged(how: str, every: Sequence[Mapping[str, Any]], rows: Sequence[Sequence[Row]]) -> Iterator[str]:
    yield f"  {how}: {_told(row for own in rows for row in own)}"
    found = [lost(one, own) for one, own in zip(every, rows, strict=True)]
    first = [lost(one, [row.first() for row in own]) for one, own in zip(every, rows, strict=True)]
    good, at_first = (sum(each <= CLOSE for each in each_of) for each_of in (found, first))
    yield (
        f"    chosen: within 5 % of the best in {good} of {len(found)} ({at_first} by the first two runs alone), "
        f"{mean(found):.1%} mean, {max(found):.1%} worst"
    )
    noise = mean(row.noise for own in rows for row in own)
    signs = [sign for own in rows for sign in _signs(own, noise=noise)]
    if signs:
        yield (
            f"    order: Kendall's tau {mean(signs):.3f}, of {len(signs)} pairs of a job's layouts that differ by "
            f"more than the noise ({noise:.1%}, or their own runs)"
        )


def _told(rows: Iterable[Row]) -> str:
    rows = list(rows)
    errors, noise = [abs(row.error) for row in rows], [row.noise for row in rows]
    return (
        f"{mean(errors):.1%} mean, {median(errors):.1%} median, {max(errors):.1%} worst; two runs are "
        f"{mean(noise):.1%} apart on average, {median(noise):.1%} median, {max(noise):.1%} at most"
    )


def lost(one: Mapping[str, Any], rows: Sequence[Row]) -> float:
    """How much slower the recommended layout is than the quickest that was run."""
    return recommended(one, rows).seconds / min(row.seconds for row in rows) - 1


def recommended(one: Mapping[str, Any], rows: Sequence[Row]) -> Row:
    return next(row for row in rows if row.layout == one["recommended"] and row.settings == one["settings"])


def _signs(rows: Sequence[Row], *, noise: float) -> list[int]:
    """Of pairs that differ by more than noise: 1 where they are in the order that was said, else -1."""
    signs = []
    for one, other in combinations(rows, 2):
        apart = abs(one.seconds - other.seconds) / min(one.seconds, other.seconds)
        if apart > max(noise, one.noise, other.noise):
            signs.append(1 if (one.said - other.said) * (one.seconds - other.seconds) > 0 else -1)
    return signs


def show(one: Mapping[str, Any]) -> str:
    """One job, a line a layout."""
    where = " over a line" if one["line"] else ""
    lines = [f"{one['job']}, {one['ranks']} ranks{where}: --layout {one['recommended']} {dict(one['settings'])}"]
    for row in (Row(**each) for each in one["rows"]):
        named, paced = f"{row.layout} {','.join(row.settings.values())}", row.paced()
        lines.append(
            f"  {named:<40} said {row.said * 1e3:7.1f} ms ({row.steps:3} steps), took {row.seconds * 1e3:7.1f} ms: "
            f"{row.error:+6.1%}, runs {row.noise:5.1%} apart; at one pace {paced.error:+6.1%}, {paced.noise:5.1%} apart"
        )
    return "\n".join(lines)
