"""Numbers in text: plurals, units and intervals."""

from dataclasses import replace

import pytest

from paceline.console.formatting import format_duration, format_metric, format_size, plural
from paceline.events import CheckpointSaved
from paceline.reporting.sinks.console_lines import format_event
from paceline.trainer.setup.duration import derived_interval, format_interval


@pytest.mark.parametrize(
    ("number", "word", "said"),
    [(1, "step", "1 step"), (0, "rank", "0 ranks"), (2, "process", "2 processes"), (1200, "microbatch", "1,200 microbatches")],
)  # fmt: skip
def test_one_is_singular(number: int, word: str, said: str) -> None:
    assert plural(number, word) == said


def test_sizes_and_times_are_in_a_unit_to_read() -> None:
    assert [format_size(n) for n in (0, 700, 5 << 10, 3 << 20, 9 << 30)] == [
        "0.0 KiB",
        "0.7 KiB",
        "5.0 KiB",
        "3.0 MiB",
        "9.0 GiB",
    ]
    assert [format_duration(s) for s in (0.0004, 0.048, 1.26)] == ["0 ms", "48 ms", "1.3 s"]
    saved = CheckpointSaved(step=3, path="runs/a/checkpoints/step-00000003", seconds=0.05, num_bytes=6200)
    assert format_event(saved) == "saved step-00000003 | 6.1 KiB in 50 ms"
    background = replace(saved, background_seconds=1.2)
    assert format_event(background) == "saved step-00000003 | 6.1 KiB in 50 ms, and 1.2 s in the background"


def test_a_small_metric_keeps_its_digits() -> None:
    assert [format_metric(v) for v in (1.23456, 0.001, 9.9e-4, -3.2e-5, 0.0)] == [
        "1.2346",
        "0.0010",
        "9.9e-04",
        "-3.2e-05",
        "0.0000",
    ]
    assert [format_metric(v, decimals=3) for v in (0.0123, 0.004)] == ["0.012", "4.0e-03"]


def test_a_derived_interval_is_a_tenth_of_the_run_and_ten_at_least() -> None:
    assert [derived_interval(total) for total in (1, 20, 99, 150, 5000, None)] == [10, 10, 10, 15, 500, 1000]
    assert format_interval(10, total=5) == "at the end" and format_interval(10, total=20) == "every 10 and at the end"
