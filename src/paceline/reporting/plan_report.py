"""A plan as a page: for each layout, the memory compared with the device's, and the parts of a step.

The page also has the schedule of the recommended layout and of each other layout that fits and has a pipeline.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from paceline.console.formatting import format_precise_duration, format_size, price_of_steps
from paceline.filesystem.atomic_files import write_text
from paceline.planner.advice.explanations import TIME_PART_LABELS
from paceline.planner.advice.recommendations import throughput_text, verdict_text
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.estimate import Estimate
from paceline.planner.cost.memory import MEMORY_PARTS
from paceline.planner.hardware.assumed_rates import assumption_lines
from paceline.planner.search.evaluate_named_layout import cost_model_from_json, estimate_from_row
from paceline.reporting.run_report import html_document
from paceline.reporting.step_simulation_report import timeline_section
from paceline.reporting.svg.bar_chart import BarRow, draw_bars

_MAX_LABEL_CHARACTERS = 46
_MEMORY_CAPTION = (
    "peak bytes of the fullest rank; the line is the device's memory; × is followed by the microbatch size"
)
_TIME_CAPTION = "from the plan's formulas, for the busiest rank"


def write_plan_report(answer: Mapping[str, Any], *, job: str, to: Path) -> Path:
    """Write the self-contained page of a plan."""
    write_text(to, plan_page(answer, job=job))
    return to


def plan_page(answer: Mapping[str, Any], *, job: str) -> str:
    """Return the HTML page of a plan. `answer` is the result of `plan`, or the content of a plan.json.

    Raises:
        UsageError: the plan does not state its model or its cluster.
    """
    cost_model = cost_model_from_json(answer)
    possible = [row for row in answer["plans"] if "settings" in row]
    rows = [(row, estimate_from_row(cost_model, row)) for row in possible]
    memory_rows = [BarRow(label=_bar_label(estimate), parts=estimate.memory.parts) for _, estimate in rows]
    time_rows = [BarRow(label=_bar_label(estimate), parts=_time_parts(estimate)) for _, estimate in rows]
    estimates_with_timeline = [
        estimate
        for row, estimate in rows
        if row["fits"] and (estimate.candidate.pp > 1 or _is_recommended(row, answer))
    ]
    limit = cost_model.cluster.device.memory_bytes
    parts = [
        _header(answer, cost_model, job),
        _table(answer, rows, cost_model),
        _section("Memory", _MEMORY_CAPTION, draw_bars("bytes per device", MEMORY_PARTS, memory_rows, limit=limit)),
        _section(
            "Time",
            _TIME_CAPTION,
            draw_bars(
                "seconds per step", [*TIME_PART_LABELS.values()], time_rows, format_value=format_precise_duration
            ),
        ),
        *(timeline_section(cost_model, candidate=estimate.candidate) for estimate in estimates_with_timeline),
        _differences(answer.get("differences", ())),
        _assumptions(cost_model, is_offloaded=any(estimate.candidate.offload for _, estimate in rows)),
    ]
    return html_document(f"{job} · plan", parts)


def _is_recommended(row: Mapping[str, Any], answer: Mapping[str, Any]) -> bool:
    return bool(row["layout"] == answer["recommended"])


def _bar_label(estimate: Estimate) -> str:
    name = (
        estimate.layout
        if len(estimate.layout) <= _MAX_LABEL_CHARACTERS
        else f"{estimate.layout[: _MAX_LABEL_CHARACTERS - 1]}…"
    )
    return f"{name} × {estimate.candidate.micro_batch_size}"


def _time_parts(estimate: Estimate) -> dict[str, float]:
    return {TIME_PART_LABELS[name]: value for name, value in estimate.seconds.parts.items()}


def _header(answer: Mapping[str, Any], cost_model: CostModel, job: str) -> str:
    profile = cost_model.profile
    shown = {
        "case": str(answer["case"]),  # what fits on one device: one of the three cases in docs/plan.md
        "recommended": str(answer["recommended"] or "none fits"),
        "parameters": f"{profile.parameters:,}",
        "global batch": f"{profile.global_batch_size:,}",
        "length": f"{profile.length:,}" if profile.length > 1 else "–",
        "precision": profile.precision,
        "device": f"{cost_model.cluster.device.name}, {format_size(round(cost_model.cluster.device.memory_bytes))}",
    }
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shown.items())
    return (
        f"<header><h1>{escape(job)} <small>on {escape(str(cost_model.cluster))}</small></h1><dl>{cells}</dl></header>"
    )


def _table(answer: Mapping[str, Any], rows: Sequence[tuple[Mapping[str, Any], Estimate]], cost_model: CostModel) -> str:
    rate = "tokens/s" if cost_model.profile.length > 1 else "samples/s"
    rate_per_device = f"{rate} per {'GPU' if cost_model.cluster.device.is_accelerator else 'rank'}"
    head = ["layout", "microbatch", "", "peak", "step", rate, rate_per_device, "MFU", "price of 1,000 steps", "why"]
    lines = [_cells(row, estimate, cost_model) for row, estimate in rows]
    shown_columns = [column for column in range(len(head)) if column < 2 or any(line[column] for line in lines)]
    body = "".join(f"<tr>{''.join(f'<td>{line[column]}</td>' for column in shown_columns)}</tr>" for line in lines)
    impossible = [
        f"<b>{escape(row['layout'])}</b>: {escape(row['why'])}" for row in answer["plans"] if "settings" not in row
    ]
    bottlenecks = map(escape, answer.get("limits", ()))  # lines on what limits the recommended layout's step time
    notes = "".join(f"<li>{line}</li>" for line in [*impossible, *bottlenecks])
    titles = "".join(f"<th>{head[column]}</th>" for column in shown_columns)
    note_list = f"<ul>{notes}</ul>" if notes else ""
    return f'<section><div class="plans"><table><tr>{titles}</tr>{body}</table></div>{note_list}</section>'


def _cells(row: Mapping[str, Any], estimate: Estimate, cost_model: CostModel) -> list[str]:
    """Return the cells of a layout's row as HTML; an empty one if the layout has no such value."""
    changes = "".join(
        f"<br>{escape(change['change'])}: {format_precise_duration(change['step_seconds'])} per step"
        for change in row["changes"]
    )
    mark = verdict_text(fits=row["fits"], tight=row.get("tight", False), refused=row.get("refused", ""))
    badge_class = {"fits": "bitwise", "tight": "rounding"}.get(mark, "bad")
    profile = cost_model.profile
    return [
        escape(estimate.layout),
        str(estimate.candidate.micro_batch_size),
        f'<span class="badge {badge_class}">{mark}</span>',
        format_size(row["peak_bytes"]) + (" (replayed)" if row.get("replayed") else ""),
        format_precise_duration(estimate.step_seconds) + (" (timed)" if row.get("timed") else ""),
        f"{profile.global_batch_size * profile.length / estimate.step_seconds:,.0f}",
        throughput_text(estimate)[1],
        f"{estimate.mfu:.1%}",
        "" if estimate.price is None else escape(price_of_steps(estimate.price, estimate.currency)),
        escape(row["why"]) + (f'<span class="soft">{changes}</span>' if changes else ""),
    ]


def _differences(differences: Sequence[Sequence[str]]) -> str:
    """Return a section with the differences of each layout from the first one, as HTML.

    `differences` has the results of `layout_differences`. The first line of each is its title.
    """
    body = ""
    for title, *differing_lines in differences:
        body += f"<h3>{escape(title)}</h3><ul>{''.join(f'<li>{escape(line)}</li>' for line in differing_lines)}</ul>"
    return f"<section><h2>Differences from the first layout</h2>{body}</section>" if body else ""


def _assumptions(cost_model: CostModel, *, is_offloaded: bool) -> str:
    _, *lines = assumption_lines(cost_model.cluster, precision=cost_model.profile.precision, is_offloaded=is_offloaded)
    items = "".join(f"<li>{escape(line.strip())}</li>" for line in lines)
    return f"<section><h2>Assumptions</h2><ul>{items}</ul></section>"


def _section(title: str, note: str, body: str) -> str:
    return f'<section><h2>{title}</h2><p class="soft">{escape(note)}</p>{body}</section>' if body else ""
