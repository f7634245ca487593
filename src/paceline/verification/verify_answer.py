"""The answer of `verify`: fixed keys, the rungs, and lines for a console."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.console.formatting import plural
from paceline.verification.rung_result import DIFFERENT, UNDECIDED, VERDICTS, RungResult


@dataclass(frozen=True, kw_only=True)
class Rung:
    """A rung of the verification: its name, what it rules out, and its result."""

    name: str
    rules_out: str
    result: RungResult
    seconds: float = 0.0

    @property
    def is_decided(self) -> bool:
        """True if the rung found a difference or compared anything."""
        return self.result.verdict == DIFFERENT or any(self.result.compared.values())

    def as_json(self) -> dict[str, Any]:
        """Return the rung as JSON for the answer."""
        found = self.result
        return {
            "name": self.name,
            "rules_out": self.rules_out,
            "verdict": found.verdict if self.is_decided else UNDECIDED,
            "max_difference": found.max_difference,
            "noise_floor": found.noise_floor,
            "compared": found.compared,
            "detail": found.detail.strip(),
            "warning": found.warning,
            "left_out": found.left_out,
            "first_difference": found.first_difference,
            "seconds": round(self.seconds, 3),
        }


def verify_answer(
    *,
    rungs: Sequence[Rung],
    layout: str,
    update: str,
    ranks: int,
    steps: int,
    compress: str = "none",
    micro_batch_size: int = 0,
) -> dict[str, Any]:
    """Return the whole answer. Its verdict is the worst of all rungs, or undecided if none compared the layout."""
    results = [rung.result for rung in rungs]
    worst = max(results, key=lambda f: (VERDICTS.index(f.verdict), f.max_difference / (f.noise_floor or 1e-300)))
    rule = update if update != "sync" else compress if compress != "none" else ""
    is_decided = worst.verdict == DIFFERENT or any(rung.is_decided for rung in rungs[1:])
    value = {
        "verdict": worst.verdict if is_decided else UNDECIDED,
        "reference": f"serial {rule}" if rule else "single",
        "layout": layout,
        "update": update,
        "compress": compress,
        "ranks": ranks,
        "steps": steps,
        "micro_batch_size": micro_batch_size,
        "by_micro": any(f.by_micro for f in results),
        "max_difference": worst.max_difference,
        "noise_floor": worst.noise_floor,
        "first_difference": next((f.first_difference for f in results if f.first_difference is not None), None),
        "rungs": [rung.as_json() for rung in rungs],
    }
    return {**value, "lines": verdict_table(value)}


def verdict_table(value: dict[str, Any]) -> list[str]:
    """Return the answer as a small table and one sentence."""
    rows = [("", "rung", "verdict", "apart", "floor", "compared")]
    for rung in value["rungs"]:
        mark = "✗" if rung["verdict"] == DIFFERENT else "!" if rung["warning"] or rung["left_out"] else "✓"
        counts = ", ".join(plural(number, kind.removesuffix("s")) for kind, number in rung["compared"].items())
        apart, floor = (_shown(rung[key]) for key in ("max_difference", "noise_floor"))
        rows.append((mark, rung["name"], rung["verdict"], apart, floor, counts))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"  {rung['name']}: {rung['detail']}" for rung in value["rungs"] if rung["detail"]]
    warnings = [f"  warning: {rung['warning']}" for rung in value["rungs"] if rung["warning"]]
    warnings += [
        f"  not covered: {what}." for what in dict.fromkeys(rung["left_out"] for rung in value["rungs"]) if what
    ]
    return [*lines, *warnings, _sentence(value)]


def _sentence(value: dict[str, Any]) -> str:
    first = value["first_difference"]
    if first is not None:
        return f"DIFFERENT at step {first['step']}, first in {first['parameter']}: {first['cause']}"
    if value["verdict"] == UNDECIDED:
        return "UNDECIDED: nothing could be compared with one process, for the reason above"
    meaning = "bit for bit" if value["verdict"] == "bitwise" else "up to rounding, below the floor of every tensor"
    ranks = plural(value["ranks"], "rank")
    process = f"one process{_of(value)}"
    if value["by_micro"]:  # with other microbatches, one process may train differently
        process += f" in microbatches of {value['micro_batch_size']}"
    same = f"{value['layout']} on {ranks} is the same training as {process}: {value['verdict']} ({meaning})"
    if value["rungs"][0]["warning"]:
        same += "; a different micro_batch_size changes the training: see the warning"
    return f"{same}, except what is not covered" if any(rung["left_out"] for rung in value["rungs"]) else same


def _of(value: dict[str, Any]) -> str:
    return "" if value["reference"] == "single" else f" that does {value['reference'].removeprefix('serial ')}"


def _shown(value: float) -> str:
    return f"{value:.1e}" if value else "0"
