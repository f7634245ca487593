"""The `report` verb: writes the HTML page of a run."""

from pathlib import Path

from paceline.commands.command_table import ReportOptions, VerbOutput
from paceline.errors import UsageError
from paceline.filesystem.atomic_files import check_writable
from paceline.reporting.run_report import write_report
from paceline.run_folder.run_folder import find_run


def report(run: str | None = None, *, page: str | Path | None = None) -> Path:
    """Write a run's page, `report.html` in its folder or the file `page`, and return its path.

    Raises:
        UsageError: there is no such run, or the page can't be written.
    """
    folder, _ = find_run(run)
    target = Path(page) if page is not None else folder.report
    try:
        check_writable(target)
    except UsageError as error:
        raise UsageError(error.what, hint="--page FILE writes it elsewhere") from None
    return write_report(folder, to=target)


def run_verb(options: ReportOptions, _: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    path = report(options.run, page=options.page)
    return 0, {"report": str(path)}, str(path)
