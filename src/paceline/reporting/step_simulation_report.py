"""A simulated step as a picture, alone or on a page with the parts of its time."""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from html import escape
from pathlib import Path

from paceline.console.formatting import format_change, format_precise_duration, plural
from paceline.filesystem.atomic_files import write_text
from paceline.planner.advice.explanations import SPENT_ON, of_misfit
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.simulation.candidate_simulation import CandidateSimulation, simulate_candidate
from paceline.planner.simulation.exposed_communication import BORDERS
from paceline.planner.simulation.failure_forecast import FailureForecast
from paceline.planner.simulation.goodput import goodput
from paceline.reporting.run_report import document
from paceline.reporting.svg.bar_chart import BarRow, bars
from paceline.reporting.svg.charts import Curve, chart
from paceline.schedule.program_svg import draw

WORDS = {**SPENT_ON, "bubble": "waiting in the pipeline", BORDERS: "messages between stages"}
_SMALL = 1e-4  # the fraction of a step below which a part is not shown
_LEAST = 24  # microbatches that a picture shows at most; two per stage at least


def timeline_svg(forecast: CostModel, *, candidate: Candidate) -> tuple[str, int]:
    """Draw one pipeline from its first forward to its last backward; return the SVG and its number of microbatches."""
    micro = forecast.num_micro(candidate)
    shown = min(micro, max(_LEAST, 2 * candidate.pp))
    batch = (
        forecast.facts.global_batch_size if shown == micro else shown * candidate.replicas * candidate.micro_batch_size
    )
    fewer = CostModel(
        facts=replace(forecast.facts, global_batch_size=batch), fleet=forecast.fleet, efficiency=forecast.efficiency
    )
    return draw(simulate_candidate(fewer, candidate=candidate).timeline, unit="s"), shown


def timeline_section(forecast: CostModel, *, candidate: Candidate) -> str:
    """Return the picture with its heading; it scrolls if the window is too narrow."""
    svg, shown = timeline_svg(forecast, candidate=candidate)
    wide = re.sub(r'<svg (.*?width="(\d+)")', r'<svg style="max-width:none;width:\2px" \1', svg, count=1)
    micro = forecast.num_micro(candidate)
    fewer = f" The picture shows {shown} of its {plural(micro, 'microbatch')}." if shown < micro else ""
    said = (
        "One pipeline, from the first forward to the last backward. Exposed communication over other axes "
        f"is part of the compute that waits for it; idle includes waiting for messages between stages.{fewer}"
    )
    title = f"<h2>A step of {escape(str(candidate))}</h2>"
    return f'<section>{title}<p class="soft">{said}</p><figure class="table">{wide}</figure></section>'


def parts_bars(found: CandidateSimulation) -> str:
    """Draw the mean rank's seconds on virtual time, and below them the closed forms' seconds for the busiest rank."""
    rows = [
        ("on virtual time, a mean rank", found.seconds),
        ("closed forms, the busiest", found.estimate.seconds.parts),
    ]
    lines = [
        BarRow(name=name, parts={WORDS[part]: max(0.0, value) for part, value in parts.items()}) for name, parts in rows
    ]
    return bars("seconds per step", [*WORDS.values()], lines, show=format_precise_duration)


def lines_of(found: CandidateSimulation, forecast: CostModel) -> Iterator[str]:
    """Yield the lines for the screen: the step, its parts, its rate, and the closed forms' numbers."""
    step, facts = found.step_seconds, forecast.facts
    yield f"{found.estimate.candidate} on {forecast.fleet}, {plural(found.ranks, 'rank')}: {format_precise_duration(step)} per step"
    if not found.estimate.fits:
        yield f"  {'' if found.estimate.is_tight else 'it does not fit: '}{of_misfit(found.estimate)}"
    shown = {WORDS[name]: value for name, value in found.seconds.items() if value > _SMALL * step}
    width = max(map(len, shown))
    for name, value in sorted(shown.items(), key=lambda pair: -pair[1]):
        yield f"  {name:{width}}  {format_precise_duration(value):>8}  {value / step:6.1%}"
    word = "token" if facts.length > 1 else "sample"
    rate = found.tokens / step
    each = f", {_read(rate / found.ranks)} of each device" if found.ranks > 1 else ""
    yield f"  {_read(rate)} {word}s a second{each}; MFU {found.mfu:.1%}"
    closed = found.estimate.step_seconds
    yield f"  the closed forms of the plan: {format_precise_duration(closed)}; on virtual time it is {format_change(found.off, digits=1)}"


def _read(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def write_step(
    forecast: CostModel, found: CandidateSimulation, kept: FailureForecast | None, *, job: str, to: Path
) -> Path:
    """Write the page, or the timeline alone if the name ends in `.svg`; it loads nothing from the network."""
    candidate = found.estimate.candidate
    if to.suffix == ".svg":
        write_text(to, timeline_svg(forecast, candidate=candidate)[0])
        return to
    parts = [
        f"<header><h1>{escape(job)} <small>{escape(str(candidate))} on {escape(str(forecast.fleet))}</small></h1>"
        f"{_numbers(found, forecast, kept)}</header>",
        f"<section><h2>A step</h2>{parts_bars(found)}</section>",
        timeline_section(forecast, candidate=candidate),
        _failures(kept),
    ]
    write_text(to, document(f"{job} · a step", parts))
    return to


def _numbers(found: CandidateSimulation, forecast: CostModel, kept: FailureForecast | None) -> str:
    word = "tokens" if forecast.facts.length > 1 else "samples"
    shown = {
        "step": format_precise_duration(found.step_seconds),
        "ranks": f"{found.ranks:,}",
        f"{word} a second": f"{found.tokens / found.step_seconds:,.0f}",
        "MFU": f"{found.mfu:.1%}",
        "bubble": f"{found.bubble:.1%}",
        "exposed communication": f"{found.exposed:.1%}",
    }
    if kept is not None:
        shown |= {"goodput, at best": f"{kept.best.useful:.1%}", "a checkpoint every": plural(kept.best_every, "step")}
    cells = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in shown.items())
    return f"<dl>{cells}</dl>"


def _failures(kept: FailureForecast | None) -> str:
    """Draw the goodput over the interval between checkpoints."""
    if kept is None:
        return ""
    least = max(1, math.ceil(kept.hazard.write_seconds / kept.step_seconds))
    steps = sorted({max(least, round(kept.best_every * 2 ** (n / 8))) for n in range(-24, 25)})
    points = [(float(n), goodput(hazard=kept.hazard, interval_seconds=n * kept.step_seconds).useful) for n in steps]
    drawn = chart("goodput by steps between checkpoints", [Curve(name="useful", points=points)])
    said = "".join(f"<li>{escape(line.strip())}</li>" for line in kept.lines())
    return f'<section><h2>Failures</h2><ul>{said}</ul><div class="charts">{drawn}</div></section>'
