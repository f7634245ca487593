"""A plan as a page: each layout's memory against the device's limit, the parts of its step, and its schedule."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from paceline.console.formatting import format_precise_duration, format_size, price_of_steps
from paceline.filesystem.atomic_files import write_text
from paceline.planner.advice.explanations import SPENT_ON
from paceline.planner.advice.recommendations import mark_of, rate_of
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.memory import PARTS
from paceline.planner.hardware.assumed_rates import assumption_lines
from paceline.planner.search.evaluate_named_layout import estimate_told, forecast_of
from paceline.reporting.run_report import document
from paceline.reporting.step_simulation_report import timeline_section
from paceline.reporting.svg.bar_chart import BarRow, bars

_MOST_LABEL = 46
_HOLDS = "peak bytes of the fullest rank; the line is the device's memory; × is followed by the microbatch size"
_GOES = "by the closed forms, for the busiest rank"


def write_plan(answer: Mapping[str, Any], *, job: str, to: Path) -> Path:
    """Write the page, which loads nothing from the network."""
    write_text(to, plan_page(answer, job=job))
    return to


def plan_page(answer: Mapping[str, Any], *, job: str) -> str:
    """Return the page of an answer to `plan`, or of a plan.json.

    Raises:
        UsageError: the plan does not state its model or its cluster.
    """
    forecast = forecast_of(answer)
    told = [row for row in answer["plans"] if "settings" in row]
    rows = [(row, estimate_told(forecast, row)) for row in told]
    memory = [BarRow(label=_name(found), parts=found.memory.parts) for _, found in rows]
    spent = [BarRow(label=_name(found), parts=_words(found)) for _, found in rows]
    drawn = [found for row, found in rows if row["fits"] and (found.candidate.pp > 1 or _is_first(row, answer))]
    limit = forecast.fleet.device.memory_bytes
    parts = [
        _header(answer, forecast, job),
        _table(answer, rows, forecast),
        _section("Memory", _HOLDS, bars("bytes per device", PARTS, memory, limit=limit)),
        _section("Time", _GOES, bars("seconds per step", [*SPENT_ON.values()], spent, show=format_precise_duration)),
        *(timeline_section(forecast, candidate=found.candidate) for found in drawn),
        _differences(answer.get("differences", ())),
        _assumptions(forecast, is_offloaded=any(found.candidate.offload for _, found in rows)),
    ]
    return document(f"{job} · plan", parts)


def _is_first(row: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    return bool(row["layout"] == answer["recommended"])


def _name(found: Estimate) -> str:
    name = found.layout if len(found.layout) <= _MOST_LABEL else f"{found.layout[: _MOST_LABEL - 1]}…"
    return f"{name} × {found.candidate.micro_batch_size}"


def _words(found: Estimate) -> dict[str, float]:
    return {SPENT_ON[name]: value for name, value in found.seconds.parts.items()}


def _header(answer: Mapping[str, Any], forecast: CostModel, job: str) -> str:
    facts = forecast.facts
    shown = {
        "case": str(answer["case"]),
        "recommended": str(answer["recommended"] or "none fits"),
        "parameters": f"{facts.parameters:,}",
        "global batch": f"{facts.global_batch_size:,}",
        "length": f"{facts.length:,}" if facts.length > 1 else "–",
        "precision": facts.precision,
        "device": f"{forecast.fleet.device.name}, {format_size(round(forecast.fleet.device.memory_bytes))}",
    }
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shown.items())
    return f"<header><h1>{escape(job)} <small>on {escape(str(forecast.fleet))}</small></h1><dl>{cells}</dl></header>"


def _table(answer: Mapping[str, Any], rows: Sequence[tuple[Mapping[str, Any], Estimate]], forecast: CostModel) -> str:
    rate = "tokens/s" if forecast.facts.length > 1 else "samples/s"
    each = f"{rate} per {'GPU' if forecast.fleet.device.is_accelerator else 'rank'}"
    head = ["layout", "microbatch", "", "peak", "step", rate, each, "MFU", "price of 1,000 steps", "why"]
    lines = [_cells(row, found, forecast) for row, found in rows]
    kept = [at for at in range(len(head)) if at < 2 or any(line[at] for line in lines)]
    body = "".join(f"<tr>{''.join(f'<td>{line[at]}</td>' for at in kept)}</tr>" for line in lines)
    lost = [f"<b>{escape(row['layout'])}</b>: {escape(row['why'])}" for row in answer["plans"] if "settings" not in row]
    notes = "".join(f"<li>{line}</li>" for line in [*lost, *map(escape, answer.get("limits", ()))])
    titles = "".join(f"<th>{head[at]}</th>" for at in kept)
    said = f"<ul>{notes}</ul>" if notes else ""
    return f'<section><div class="plans"><table><tr>{titles}</tr>{body}</table></div>{said}</section>'


def _cells(row: Mapping[str, Any], found: Estimate, forecast: CostModel) -> list[str]:
    changes = "".join(
        f"<br>{escape(one['change'])}: {format_precise_duration(one['step_seconds'])} per step"
        for one in row["changes"]
    )
    mark = mark_of(fits=row["fits"], tight=row.get("tight", False), refused=row.get("refused", ""))
    kind = {"fits": "bitwise", "tight": "rounding"}.get(mark, "bad")
    facts = forecast.facts
    return [
        escape(found.layout),
        str(found.candidate.micro_batch_size),
        f'<span class="badge {kind}">{mark}</span>',
        format_size(row["peak_bytes"]) + (" (replayed)" if row.get("replayed") else ""),
        format_precise_duration(found.step_seconds) + (" (timed)" if row.get("timed") else ""),
        f"{facts.global_batch_size * facts.length / found.step_seconds:,.0f}",
        rate_of(found)[1],
        f"{found.mfu:.1%}",
        "" if found.price is None else escape(price_of_steps(found.price, found.currency)),
        escape(row["why"]) + (f'<span class="soft">{changes}</span>' if changes else ""),
    ]


def _differences(every: Sequence[Sequence[str]]) -> str:
    found = ""
    for title, *said in every:
        found += f"<h3>{escape(title)}</h3><ul>{''.join(f'<li>{escape(line)}</li>' for line in said)}</ul>"
    return f"<section><h2>Differences</h2>{found}</section>" if found else ""


def _assumptions(forecast: CostModel, *, is_offloaded: bool) -> str:
    _, *lines = assumption_lines(forecast.fleet, precision=forecast.facts.precision, is_offloaded=is_offloaded)
    items = "".join(f"<li>{escape(line.strip())}</li>" for line in lines)
    return f"<section><h2>Assumptions</h2><ul>{items}</ul></section>"


def _section(title: str, note: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p class="soft">{escape(note)}</p>{body}</section>' if body else ""
