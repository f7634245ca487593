"""The first steps against a forecast: reported once, and only where a ratio has a meaning."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.events import Event, EventBus, ForecastChecked
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.reporting.sinks.console_lines import format_event
from paceline.trainer.diagnostics import forecast_check as module
from paceline.trainer.diagnostics.forecast_check import _NUM_STEPS, MIN_COMPARABLE_BYTES, ForecastCheck
from paceline.trainer.diagnostics.memory_report import MemoryBaseline


class Heard:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def rung(**other: Any) -> LayoutForecast:
    own = {"peak_bytes": 2 * MIN_COMPARABLE_BYTES, "step_seconds": 0.5, "longer": 2.0, "source": "auto", **other}
    return LayoutForecast(
        layout="ddp", family="ddp", ranks=2, settings={"train.micro_batch_size": "4"}, parts={}, **own
    )


def run(
    forecast: LayoutForecast | None, monkeypatch: Any, *, steps: int, busy: float = 0.0
) -> tuple[list[Any], list[Any]]:
    """Of two ranks, the other of which took 0.3 s a step and 3 times what can be compared."""
    heard, kept = Heard(), []
    other = [3 * MIN_COMPARABLE_BYTES, 0.3, {"machine": "another", "work": 10.0, "idle": 0.0, "own": 10.0 * (1 - busy)}]
    world = SimpleNamespace(device=torch.device("cpu"), gather_json=lambda value: [value, other], is_main=True)
    plan = SimpleNamespace(mesh=SimpleNamespace(ranks=2), device="cpu", threads=1)
    before = MemoryBaseline(used_bytes={"VmRSS": 0, "VmHWM": 0})
    built: Any = SimpleNamespace(world=world, plan=plan)
    monkeypatch.setattr(module, "machine_fingerprint", lambda ranks, device: SimpleNamespace(threads=1))
    monkeypatch.setattr(module, "record_forecast_ratio", lambda mark, family, **ratios: kept.append((family, ratios)))
    watch = ForecastCheck(forecast=forecast, setup=built, memory_baseline=before, event_bus=EventBus([heard]))
    for step in range(1, steps + 1):
        with watch.timing():
            pass
        watch.report_when_ready(step=step, is_last_step=step == steps)
    watch.store_ratios()
    return heard.events, kept


def test_without_a_forecast_nothing_is_said(monkeypatch: Any) -> None:
    assert run(None, monkeypatch, steps=12) == ([], [])


@pytest.mark.parametrize("steps", [1, 3, _NUM_STEPS, 3 * _NUM_STEPS])
def test_it_is_said_once_and_kept_without_the_correction(steps: int, monkeypatch: Any) -> None:
    (told,), kept = run(rung(), monkeypatch, steps=steps)
    assert isinstance(told, ForecastChecked) and told.step == min(steps, _NUM_STEPS)
    assert (
        told.measured_bytes == 3 * MIN_COMPARABLE_BYTES
        and told.memory_ratio == 1.5
        and told.time_ratio == pytest.approx(0.6)
    )
    assert kept == [("ddp", {"longer": pytest.approx(1.2), "fuller": 1.5})]
    assert (
        "1.0 GiB on the fullest rank" in format_event(told)
        and "(1.50 times)" in format_event(told)
        and "(0.60 times)" in format_event(told)
    )


def test_what_says_nothing_of_larger_runs_is_neither_divided_nor_kept(monkeypatch: Any) -> None:
    (told,), kept = run(rung(peak_bytes=MIN_COMPARABLE_BYTES - 1), monkeypatch, steps=3)
    assert told.memory_ratio is None and "times)" in format_event(told) and format_event(told).count("times") == 1
    assert kept == [("ddp", {"longer": pytest.approx(1.2), "fuller": None})]
    for forecast, busy in ((rung(step_seconds=0.03), 0.0), (rung(), 0.9)):
        (told,), kept = run(forecast, monkeypatch, steps=3, busy=busy)
        assert kept[0][1]["longer"] is None and told.others == pytest.approx(busy)
        assert format_event(told).endswith("while other programs used 90% of the cores") == bool(busy)
