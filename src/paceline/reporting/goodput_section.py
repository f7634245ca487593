"""The goodput of a run: which part of its time was spent on steps that count, and where the rest went."""

import math
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from paceline.reporting.failures import read_restarts
from paceline.reporting.run_history import History
from paceline.reporting.svg.bar_chart import BarRow, draw_bars

USEFUL = "useful steps"
_SLOW_FACTOR = 2.0  # a step longer than this many usual steps contains a wait


@dataclass(frozen=True, kw_only=True)
class GoodputBreakdown:
    """The wall-clock seconds of a run, by what they were spent on. Time between two commands is left out.

    `losses` has, in this order: `start` (from the command until the first step may begin), `restarts` (from each fault
    until the ranks were ready again), `repeated steps` (steps whose result a fault lost), `saves`, `evaluation`, and
    `waits` (the time beyond a usual step, of steps that took longer than two usual ones, for example because a rank was
    stopped or compiled).
    """

    useful: float
    losses: dict[str, float]

    @property
    def total(self) -> float:
        """The sum of all seconds."""
        return self.useful + sum(self.losses.values())

    @property
    def goodput(self) -> float:
        """The part of the time that was spent on steps that count."""
        return self.useful / self.total if self.total else 0.0


def read_goodput(history: History) -> GoodputBreakdown | None:
    """Return where the time of a run went; None if it has not logged a step."""
    attempts = _split_by_attempt(history.events)
    usual_step = median([_number(e, "step_seconds") for e in history.events_of_kind("StepDone")] or [0.0])
    if not usual_step:
        return None
    restarts = {restart.attempt: restart for restart in read_restarts(history)}
    losses = dict.fromkeys(("start", "restarts", "repeated steps", "saves", "evaluation", "waits"), 0.0)
    useful = 0.0
    for attempt, following in pairwise([*attempts, []]):
        begin, end = _number(attempt[0], "time"), _number(attempt[-1], "time")
        own, next_restart = (
            restarts.get(int(_number(events[0], "attempt"))) if events else None for events in (attempt, following)
        )
        if own is None:
            losses["start"] += _start_seconds(history, attempt[0])
        else:
            losses["restarts"] += own.seconds
            begin = max([begin, *(_number(e, "time") for e in attempt if e["event"] == "Restarted")])
        if next_restart is not None:
            end = max(begin, _restart_time(following) - next_restart.seconds)
        parts = _attempt_parts(attempt, usual_step=usual_step)
        steps_seconds = max(0.0, end - begin - sum(parts.values()))
        num_repeated = next_restart.repeated_steps if next_restart is not None else 0
        repeated = min(steps_seconds, num_repeated * usual_step)
        losses["repeated steps"] += repeated
        useful += steps_seconds - repeated
        for name, seconds in parts.items():
            losses[name] += seconds
    return GoodputBreakdown(useful=useful, losses=losses)


def show_goodput(history: History) -> str:
    """Return a section with the goodput and a waterfall of the losses, as HTML; "" for a run without a restart."""
    budget = read_goodput(history)
    if budget is None or not read_restarts(history):
        return ""
    rows, left = [BarRow(label="all time", parts={"all time": budget.total})], budget.total
    for name, seconds in budget.losses.items():
        if seconds > 0:
            left -= seconds
            rows.append(BarRow(label=name, start=left, parts={name: seconds}))
    rows.append(BarRow(label=USEFUL, parts={USEFUL: budget.useful}))
    kinds = ["all time", *budget.losses, USEFUL]
    chart = draw_bars("seconds, from all time to the useful steps", kinds, rows, format_value=lambda s: f"{s:.1f} s")
    text = f"goodput {budget.goodput:.1%}: {budget.useful:.1f} of {budget.total:.1f} s were spent on steps that count"
    return f"<section><h2>Goodput</h2><p>{escape(text)}</p>{chart}</section>"


def _split_by_attempt(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the events of each attempt, which begin with its start."""
    attempts: list[list[dict[str, Any]]] = []
    for event in events:
        if event["event"] == "RunStarted":
            attempts.append([])
        if attempts:
            attempts[-1].append(event)
    return attempts


def _start_seconds(history: History, started: dict[str, Any]) -> float:
    """Return the seconds from the launch of an attempt until its start event; 0 if another launcher started it."""
    request = Path(history.run.logs) / f"attempt-{int(_number(started, 'attempt'))}" / "request.json"
    try:
        return max(0.0, _number(started, "time") - request.stat().st_mtime)
    except OSError:
        return 0.0


def _restart_time(attempt: list[dict[str, Any]]) -> float:
    """Return the time at which the ranks of a restarted attempt were ready."""
    return next((_number(e, "time") for e in attempt if e["event"] == "Restarted"), _number(attempt[0], "time"))


def _attempt_parts(attempt: list[dict[str, Any]], *, usual_step: float) -> dict[str, float]:
    """Return the seconds of one attempt that were spent on saves, evaluation and waits.

    A logged step has mean seconds for all steps since the one that was logged before it.
    """
    saves, evaluation, waits = 0.0, 0.0, 0.0
    last_step = int(_number(attempt[0], "resumed_from"))
    for event in attempt:
        if event["event"] == "StepDone":
            num_steps, last_step = max(1, int(_number(event, "step")) - last_step), int(_number(event, "step"))
            saves += num_steps * _number(event, "checkpoint_seconds")
            evaluation += num_steps * _number(event, "evaluation_seconds")
            slowness = num_steps * (_number(event, "step_seconds") - usual_step)
            waits += slowness if slowness > (_SLOW_FACTOR - 1) * usual_step else 0.0
    saved = sum(_number(event, "seconds") for event in attempt if event["event"] == "CheckpointSaved")
    evaluated = sum(_number(event, "seconds") for event in attempt if event["event"] == "EvalDone")
    return {"saves": max(saves, saved), "evaluation": max(evaluation, evaluated), "waits": waits}


def _number(event: dict[str, Any], name: str) -> float:
    """Return a finite number of an event; 0 if there is none."""
    value = event.get(name)
    try:
        number = float(value) if isinstance(value, int | float) else 0.0
    except OverflowError:
        return 0.0
    return number if math.isfinite(number) else 0.0
