"""The answer of `verify` as JSON, and as a table for the console."""

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
        result = self.result
        return {
            "name": self.name,
            "rules_out": self.rules_out,
            "verdict": result.verdict if self.is_decided else UNDECIDED,
            "max_difference": result.max_difference,
            "noise_floor": result.noise_floor,
            "compared": result.compared,
            "detail": result.detail.strip(),
            "warning": result.warning,
            "left_out": result.left_out,
            "first_difference": result.first_difference,
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
    not_exercised: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the answer as JSON. Its verdict is the worst of all rungs, or undecided if none compared the layout.

    `not_exercised` limits what a good verdict says, and is left out with any other verdict.
    """
    results = [rung.result for rung in rungs]
    worst = max(results, key=lambda r: (VERDICTS.index(r.verdict), r.max_difference / (r.noise_floor or 1e-300)))
    rule = update if update != "sync" else compress if compress != "none" else ""  # what the reference does serially
    # the first rung compares one process with itself, not with the layout
    is_decided = worst.verdict == DIFFERENT or any(rung.is_decided for rung in rungs[1:])
    answer = {
        "verdict": worst.verdict if is_decided else UNDECIDED,
        "reference": f"serial {rule}" if rule else "single",
        "layout": layout,
        "update": update,
        "compress": compress,
        "ranks": ranks,
        "steps": steps,
        "micro_batch_size": micro_batch_size,
        "by_micro": any(result.depends_on_microbatches for result in results),
        "max_difference": worst.max_difference,
        "noise_floor": worst.noise_floor,
        "first_difference": next((r.first_difference for r in results if r.first_difference is not None), None),
        "not_exercised": [*not_exercised] if is_decided and worst.verdict != DIFFERENT else [],
        "rungs": [rung.as_json() for rung in rungs],
    }
    return {**answer, "lines": verdict_table(answer)}


def verdict_table(answer: dict[str, Any]) -> list[str]:
    """Return the answer as a small table and one sentence."""
    rows = [("", "rung", "verdict", "difference", "floor", "compared")]
    for rung in answer["rungs"]:
        mark = "✗" if rung["verdict"] == DIFFERENT else "!" if rung["warning"] or rung["left_out"] else "✓"
        counts = ", ".join(plural(number, kind.removesuffix("s")) for kind, number in rung["compared"].items())
        difference, floor = (_format_distance(rung[key]) for key in ("max_difference", "noise_floor"))
        rows.append((mark, rung["name"], rung["verdict"], difference, floor, counts))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"  {rung['name']}: {rung['detail']}" for rung in answer["rungs"] if rung["detail"]]
    warnings = [f"  warning: {rung['warning']}" for rung in answer["rungs"] if rung["warning"]]
    warnings += [
        f"  not covered: {text}." for text in dict.fromkeys(rung["left_out"] for rung in answer["rungs"]) if text
    ]
    warnings += [f"  not exercised: {text}" for text in answer["not_exercised"]]
    return [*lines, *warnings, _verdict_sentence(answer)]


def _verdict_sentence(answer: dict[str, Any]) -> str:
    first = answer["first_difference"]
    if first is not None:
        return f"DIFFERENT at step {first['step']}, first in {first['parameter']}: {first['cause']}"
    if answer["verdict"] == UNDECIDED:
        return "UNDECIDED: nothing could be compared with one process, for the reason above"
    meaning = (
        "bit for bit"
        if answer["verdict"] == "bitwise"
        else "equal up to rounding: no tensor differs by more than its noise floor"
    )
    ranks = plural(answer["ranks"], "rank")
    process = f"one process{_rule_suffix(answer)}"
    if answer["by_micro"]:  # with other microbatches, one process may train differently
        process += f" in microbatches of {answer['micro_batch_size']}"
    sentence = f"{answer['layout']} on {ranks} is the same training as {process}: {answer['verdict']} ({meaning})"
    if answer["rungs"][0]["warning"]:
        sentence += "; a different micro_batch_size changes the training: see the warning"
    return f"{sentence}, except what is not covered" if any(rung["left_out"] for rung in answer["rungs"]) else sentence


def _rule_suffix(answer: dict[str, Any]) -> str:
    return "" if answer["reference"] == "single" else f" that does {answer['reference'].removeprefix('serial ')}"


def _format_distance(value: float) -> str:
    return f"{value:.1e}" if value else "0"
