"""Output about a simulated step: lines for the screen, the timeline as SVG, and a page with the parts of the time."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

from paceline.console.formatting import format_change, format_precise_duration, plural
from paceline.filesystem.atomic_files import write_text
from paceline.planner.advice.explanations import TIME_PART_LABELS, explain_misfit
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.simulation.candidate_simulation import CandidateSimulation, simulate_candidate
from paceline.planner.simulation.exposed_communication import STAGE_MESSAGES
from paceline.planner.simulation.failure_forecast import FailureForecast
from paceline.planner.simulation.goodput import goodput
from paceline.reporting.run_report import html_document
from paceline.reporting.svg.bar_chart import BarRow, draw_bars
from paceline.reporting.svg.charts import Curve, draw_chart
from paceline.schedule.program_svg import draw

PART_LABELS = {**TIME_PART_LABELS, "bubble": "waiting in the pipeline", STAGE_MESSAGES: "messages between stages"}
_MIN_FRACTION = 1e-4  # the fraction of a step below which a part is not shown
_MIN_MICROBATCHES = 24  # a picture shows this many microbatches, or two per rank of the pipeline if that is more


def timeline_svg(cost_model: CostModel, *, candidate: Candidate) -> tuple[str, int]:
    """Draw one pipeline from its first forward to its last backward; return the SVG and how many microbatches it has."""
    num_micro = cost_model.num_micro(candidate)
    num_shown = min(num_micro, max(_MIN_MICROBATCHES, 2 * candidate.pp))
    batch = (
        cost_model.profile.global_batch_size
        if num_shown == num_micro
        else num_shown * candidate.replicas * candidate.micro_batch_size
    )
    shortened = CostModel(
        profile=replace(cost_model.profile, global_batch_size=batch),
        cluster=cost_model.cluster,
        efficiency=cost_model.efficiency,
    )
    return draw(simulate_candidate(shortened, candidate=candidate).timeline, unit="s"), num_shown


def timeline_section(cost_model: CostModel, *, candidate: Candidate) -> str:
    """Return the timeline with its heading as HTML. The timeline scrolls if the window is too narrow."""
    svg, num_shown = timeline_svg(cost_model, candidate=candidate)
    full_width = re.sub(r'<svg (.*?width="(\d+)")', r'<svg style="max-width:none;width:\2px" \1', svg, count=1)
    num_micro = cost_model.num_micro(candidate)
    shown_note = (
        f" The picture shows {num_shown} of its {plural(num_micro, 'microbatch')}." if num_shown < num_micro else ""
    )
    caption = (
        "One pipeline, from the first forward to the last backward. A forward or a backward includes the time in which "
        "it waits for communication over axes other than pp; idle includes waiting for messages between stages."
        f"{shown_note}"
    )
    title = f"<h2>A step of {escape(str(candidate))}</h2>"
    return f'<section>{title}<p class="soft">{caption}</p><figure class="table">{full_width}</figure></section>'


def parts_bars(simulated: CandidateSimulation) -> str:
    """Draw two bars: the simulated seconds, averaged over ranks, and the closed-form seconds of the busiest rank."""
    rows = [
        ("simulated, mean of the ranks", simulated.seconds),
        ("closed forms, busiest rank", simulated.estimate.seconds.parts),
    ]
    lines = [
        BarRow(name=name, parts={PART_LABELS[part]: max(0.0, value) for part, value in parts.items()})
        for name, parts in rows
    ]
    return draw_bars("seconds per step", [*PART_LABELS.values()], lines, format_value=format_precise_duration)


def step_lines(simulated: CandidateSimulation, cost_model: CostModel) -> Iterator[str]:
    """Yield the lines for the screen: the step, its parts, its rate, and the closed-form forecast."""
    step, profile = simulated.step_seconds, cost_model.profile
    yield f"{simulated.estimate.candidate} on {cost_model.cluster}, {plural(simulated.ranks, 'rank')}: {format_precise_duration(step)} per step"
    if not simulated.estimate.fits:
        yield f"  {'' if simulated.estimate.is_tight else 'it does not fit: '}{explain_misfit(simulated.estimate)}"
    shown = {PART_LABELS[name]: value for name, value in simulated.seconds.items() if value > _MIN_FRACTION * step}
    width = max(map(len, shown))
    for name, value in sorted(shown.items(), key=lambda pair: -pair[1]):
        yield f"  {name:{width}}  {format_precise_duration(value):>8}  {value / step:6.1%}"
    unit = "token" if profile.length > 1 else "sample"
    rate = simulated.tokens / step
    per_device = f", {_format_rate(rate / simulated.ranks)} of each device" if simulated.ranks > 1 else ""
    yield f"  {_format_rate(rate)} {unit}s a second{per_device}; MFU {simulated.mfu:.1%}"
    forecast_seconds = simulated.estimate.step_seconds
    yield f"  the closed forms of the plan: {format_precise_duration(forecast_seconds)}; the simulated step differs by {format_change(simulated.relative_difference, digits=1)}"


def _format_rate(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def write_step(
    cost_model: CostModel, simulated: CandidateSimulation, failures: FailureForecast | None, *, job: str, to: Path
) -> Path:
    """Write a self-contained page, or only the timeline if the name ends in `.svg`."""
    candidate = simulated.estimate.candidate
    if to.suffix == ".svg":
        write_text(to, timeline_svg(cost_model, candidate=candidate)[0])
        return to
    parts = [
        f"<header><h1>{escape(job)} <small>{escape(str(candidate))} on {escape(str(cost_model.cluster))}</small></h1>"
        f"{_numbers(simulated, cost_model, failures)}</header>",
        f"<section><h2>A step</h2>{parts_bars(simulated)}</section>",
        timeline_section(cost_model, candidate=candidate),
        _failures(failures),
    ]
    write_text(to, html_document(f"{job} · a step", parts))
    return to


def _numbers(simulated: CandidateSimulation, cost_model: CostModel, failures: FailureForecast | None) -> str:
    unit = "tokens" if cost_model.profile.length > 1 else "samples"
    shown = {
        "step": format_precise_duration(simulated.step_seconds),
        "ranks": f"{simulated.ranks:,}",
        f"{unit} a second": f"{simulated.tokens / simulated.step_seconds:,.0f}",
        "MFU": f"{simulated.mfu:.1%}",
        "bubble": f"{simulated.bubble:.1%}",
        "exposed communication": f"{simulated.exposed:.1%}",
    }
    if failures is not None:
        shown |= {
            "goodput, at best": f"{failures.best.useful:.1%}",
            "a checkpoint every": plural(failures.best_every, "step"),
        }
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shown.items())
    return f"<dl>{cells}</dl>"


def _failures(failures: FailureForecast | None) -> str:
    """Draw the goodput over the interval between checkpoints."""
    if failures is None:
        return ""
    min_steps = max(1, math.ceil(failures.hazard.write_seconds / failures.step_seconds))
    steps = sorted({max(min_steps, round(failures.best_every * 2 ** (n / 8))) for n in range(-24, 25)})
    points = [
        (float(n), goodput(hazard=failures.hazard, interval_seconds=n * failures.step_seconds).useful) for n in steps
    ]
    goodput_chart = draw_chart("goodput by steps between checkpoints", [Curve(name="useful", points=points)])
    items = "".join(f"<li>{escape(line.strip())}</li>" for line in failures.lines())
    return f'<section><h2>Failures</h2><ul>{items}</ul><div class="charts">{goodput_chart}</div></section>'
