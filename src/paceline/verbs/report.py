"""`report`."""

from pathlib import Path

from paceline.store.runs import find_run
from paceline.watch.report import write_report


def report(run: str | None = None) -> Path:
    """Write a run's `report.html` and return its path."""
    folder, _ = find_run(run)
    return write_report(folder)
