"""The planner's forecasts held against training speeds that others published.

    python -m benchmarks.published --rows fit           # the rows that constants may be fixed from
    python -m benchmarks.published --rows fit --fit     # fix them anew, from these alone, with what the fit is worth
    python -m benchmarks.published --rows test --out FILE

A row's error is of its seconds: +10 % where the forecast is slower than what was published. `--fit` looks for the
constants with the least loss: of each row the logarithm of forecast over published, taken squared while it is small and
straight where it is large, so that one row whose layout was concluded wrongly does not rule; with a weak pull towards
`ANCHORS`, and within `BOUNDS`. It then leaves out each source in turn and says how well the others foretell it.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.published_rows import Row, forecast_of, read_rows, step_seconds, their_seconds

from paceline.planner.hardware.efficiency import GPU_EFFICIENCY, Efficiency

ANCHORS = {
    "matmul": 0.8, "attention": 0.5, "flops_per_joule": 1e12, "memory": 0.8, "link": 0.8, "overlap": 0.7,
}  # fmt: skip
"""What kernels on their own are known to reach: large products, fused attention, copies, rings of NCCL."""
BOUNDS = {
    "matmul": (0.5, 0.95), "attention": (0.2, 0.8), "flops_per_joule": (0.6e12, 1.5e12), "memory": (0.5, 0.95),
    "link": (0.4, 0.95), "overlap": (0.2, 1.0),
}  # fmt: skip
_KNEE = 0.1  # of a logarithm, from where on the loss is straight
_PULL = 0.02  # of a row, for each constant that is an e-th away from its anchor
_ROUNDS = 30
_DIGITS = 3


@dataclass(frozen=True, kw_only=True)
class Told:
    """One row, both ways, in its own figure."""

    row: Row
    forecast: float
    error: float

    @property
    def line(self) -> tuple[str, ...]:
        """For a table."""
        own = self.row
        return (own["id"], own["figure"], f"{self.forecast:.4g}", f"{own['value']:.4g}", f"{self.error:+.1%}")


def told(row: Row, efficiency: Efficiency) -> Told:
    """A row's forecast and how far its seconds are from those that were published."""
    seconds = step_seconds(row, efficiency)
    theirs = their_seconds(row)
    figure = seconds if row["figure"] == "step_seconds" else row["value"] * theirs / seconds
    return Told(row=row, forecast=figure, error=seconds / theirs - 1)


def loss(rows: Sequence[Row], values: Mapping[str, float]) -> float:
    """Of all rows, and of being far from the anchors."""
    made = replace(GPU_EFFICIENCY, **values)
    found = 0.0
    for row in rows:
        off = log(step_seconds(row, made) / their_seconds(row)) / _KNEE
        found += _KNEE**2 * 2 * (sqrt(1 + off * off) - 1)
    return found + _PULL * sum(log(value / ANCHORS[name]) ** 2 for name, value in values.items())


def fitted(rows: Sequence[Row]) -> dict[str, float]:
    """One constant after another, by golden section, until none moves."""
    values = dict(ANCHORS)
    for _ in range(_ROUNDS):
        before = dict(values)
        for name, (low, high) in BOUNDS.items():
            values[name] = exp(_least(lambda x, name=name: loss(rows, {**values, name: exp(x)}), log(low), log(high)))  # type: ignore[misc]
        if all(abs(log(values[name] / before[name])) < 1e-3 for name in values):
            break
    return {name: float(f"{value:.{_DIGITS}g}") for name, value in values.items()}


def _least(call: Callable[[float], float], low: float, high: float) -> float:
    """Where a function with one valley is least."""
    ratio = (sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = call(left), call(right)
    while high - low > 1e-3:
        if at_left < at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = call(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = call(right)
    return (low + high) / 2


def left_out(rows: Sequence[Row]) -> list[tuple[str, float, float, dict[str, float]]]:
    """Of each source: its mean and worst error by constants that the other sources alone have fixed."""
    found = []
    for source in dict.fromkeys(row["source"] for row in rows):
        values = fitted([row for row in rows if row["source"] != source])
        errors = [abs(told(row, replace(GPU_EFFICIENCY, **values)).error) for row in rows if row["source"] == source]
        found.append((source, mean(errors), max(errors), values))
    return found


def table(found: Sequence[Told]) -> list[str]:
    """Of all rows, with mean and worst of each role."""
    lines = ["| row | figure | forecast | published | seconds off by |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {' | '.join(one.line)} |" for one in found]
    for role in dict.fromkeys(one.row["role"] for one in found):
        errors = {one.row["id"]: abs(one.error) for one in found if one.row["role"] == role}
        worst = max(errors, key=errors.__getitem__)
        lines += ["", f"{len(errors)} rows of `{role}`: mean {mean(errors.values()):.1%}, "
                  f"worst {errors[worst]:.1%} ({worst})"]  # fmt: skip
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """Print the table, or what was fitted."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", choices=("fit", "test", "all"), required=True)
    parser.add_argument("--fit", action="store_true", help="fix the constants anew; of `--rows fit` alone")
    parser.add_argument("--parts", action="store_true", help="say what the forecast seconds of each row go to")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(words)
    if asked.fit and asked.rows != "fit":
        parser.error("constants are fixed from --rows fit alone")
    rows = [row for row in read_rows() if asked.rows in ("all", row["role"])]
    efficiency, lines = GPU_EFFICIENCY, list[str]()
    if asked.fit:
        values = fitted(rows)
        efficiency = replace(GPU_EFFICIENCY, **values)
        lines += [", ".join(f"{name}={value:g}" for name, value in values.items()), ""]
        for source, middle, worst, own in left_out(rows):
            said = ", ".join(f"{name}={value:g}" for name, value in own.items())
            lines.append(f"without {source}: its rows are {middle:.1%} off on average, {worst:.1%} at most ({said})")
        lines.append("")
    lines += table([told(row, efficiency) for row in rows])
    if asked.parts:
        lines += ["", *(_parts(row, efficiency) for row in rows)]
    print("\n".join(lines))
    if asked.out is not None:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


def _parts(row: Row, efficiency: Efficiency) -> str:
    made: Any = forecast_of(row, efficiency)
    found = made.seconds(made.candidate)
    each = ", ".join(f"{name} {value / found.step_seconds:.0%}" for name, value in found.parts.items() if value)
    return f"{row['id']}: {found.step_seconds:.3g} s: {each}"


if __name__ == "__main__":
    raise SystemExit(main())
