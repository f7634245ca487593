"""The `compare` verb: recordings of scripts are compared here, and all else by `paceline.commands.compare`."""

from dataclasses import asdict
from pathlib import Path

from paceline.commands.command_table import CompareOptions, VerbOutput
from paceline.commands.compare import run_verb as compare_runs
from paceline.console.output import print_line
from paceline.errors import UsageError
from paceline.script_check.comparison.script_comparison import compare_scripts
from paceline.script_check.recording import read_origin


def run_verb(options: CompareOptions, settings: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    scripts = [read_origin(Path(run)) is not None for run in options.runs]
    if options.layouts or not any(scripts):
        return compare_runs(options, settings)
    if not all(scripts) or len(scripts) != 2:
        raise UsageError(
            "a recording of a script is compared with one other recording of a script.",
            cause=f"{options.runs[scripts.index(True)]} is one, and got {len(scripts)} arguments",
            hint="paceline record --out OTHER -- COMMAND",
        )
    comparison = compare_scripts(Path(options.runs[0]), Path(options.runs[1]))
    if not options.json:
        print_line(comparison.text)  # to standard output, also if they differ: it is the answer
    return comparison.exit_code, asdict(comparison), ""
