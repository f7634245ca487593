"""A log line has the speed at which steps were taken, although the step results arrive late."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.data.order.cursor import Cursor
from paceline.events import StepDone
from paceline.trainer.step_logger import StepLogger

EACH = 0.02


def lines(*, lag: int, steps: int, every: int) -> list[StepDone]:
    """What is logged of steps that take `EACH` seconds, of 8 samples and 24 tokens."""
    told: list[Any] = []
    replica = SimpleNamespace(
        buffers=SimpleNamespace(new_notes=list), contract=SimpleNamespace(note=""), state_recorders=()
    )
    built: Any = SimpleNamespace(
        settings=SimpleNamespace(log=SimpleNamespace(every=every, statistics=False)),
        job=SimpleNamespace(best=None, early_stopping=None, metrics={}, eval_data=None),
        step=SimpleNamespace(lag=lag, sent_bytes=None, replica=replica),
        update=SimpleNamespace(lr=0.1, refuse_empty_batch=lambda **given: None),
        world=SimpleNamespace(device=SimpleNamespace(type="cpu")),
        named_parameters=[],
    )
    feed: Any = SimpleNamespace(num_samples=None)
    logger = StepLogger(
        setup=built,
        loader=feed,
        event_bus=SimpleNamespace(emit=told.append),  # type: ignore[arg-type]
        progress=SimpleNamespace(tokens=0.0),  # type: ignore[arg-type]
    )
    for step in range(1, steps + 1):
        time.sleep(EACH)
        totals = SimpleNamespace(check_counts=lambda: None, stop=False, loss=1.0, counts={"loss": 24.0})
        result: Any = SimpleNamespace(
            step=step, samples=8, totals=totals, terms={}, loss=1.0, grad_norm=None, lr=0.1,
            compute_seconds=EACH, skipped=False, communication_seconds=0.0,
        )  # fmt: skip
        logger.record(result, cursor=Cursor())
    logger.flush()
    logger.log_last()
    return [event for event in told if isinstance(event, StepDone)]


@pytest.mark.parametrize("lag", [0, 4, 8])
def test_each_line_has_the_speed_at_which_steps_were_taken(lag: int) -> None:
    found = lines(lag=lag, steps=14, every=5)
    assert [event.step for event in found] == [1, 5, 10, 14]
    for event in found:
        assert EACH <= event.step_seconds < 3 * EACH, f"step {event.step}: {event.step_seconds}"
        assert event.samples_per_second == pytest.approx(8 / event.step_seconds)
        assert event.tokens_per_second == pytest.approx(24 / event.step_seconds)
        assert event.compute_seconds == pytest.approx(EACH)
