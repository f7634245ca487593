"""The `verify-script` verb: checks that a script trains on several ranks as in one process, fed with the same batches.

The command with many ranks is recorded first, with its batches. Then the other one gets these batches, and the
recordings are compared.
"""

import shlex
import shutil
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from msgspec import structs

from paceline.commands.command_table import VerbOutput
from paceline.console.output import print_line
from paceline.errors import ExitCode, UsageError
from paceline.script_check.comparison.script_comparison import (
    NOT_COMPARABLE,
    SAME,
    ScriptComparison,
    compare_scripts,
)
from paceline.script_check.record_command import recorder_fault
from paceline.script_check.recorded_script import record_script, refuse_options
from paceline.script_check.recording import ScriptRecording, has_batches

_EXAMPLE = "paceline verify-script --one 'python train.py' --many 'torchrun --nproc-per-node 2 train.py'"


@dataclass(frozen=True, kw_only=True)
class VerifyScriptOptions:
    """Check that an unmodified script trains on several ranks as in one process."""

    one: str
    """The command for one process, quoted. Its batch must be as large as those of all ranks together."""
    many: str
    """The command for several ranks, quoted."""
    steps: int = 8
    """Number of optimizer steps to compare."""
    seed: int | None = None
    """Seed random numbers before the first line of the script, for scripts that seed nothing."""
    out: str | None = None
    """A folder for the recordings, which must be new or empty; default: a temporary one, which is removed."""
    wait: float = 600.0
    """Seconds without an optimizer step after which a command is ended."""
    json: bool = False
    """Print the result as JSON."""


def run_verb(options: VerifyScriptOptions, _: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    refuse_options(steps=options.steps, wait=options.wait, out=options.out)
    one, many = (_words(command, name) for command, name in ((options.one, "--one"), (options.many, "--many")))
    folder = Path(options.out) if options.out else Path(tempfile.mkdtemp(prefix="paceline-verify-script-"))
    try:
        comparison = _verify(one, many, options, folder)
    finally:
        if not options.out:
            shutil.rmtree(folder, ignore_errors=True)
    if not options.json:
        print_line(comparison.text)
    return comparison.exit_code, asdict(comparison), ""


def _words(command: str, name: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(command))
    except ValueError as error:
        raise UsageError(f"{name} can't be read as a command: {error}.", hint=_EXAMPLE) from None
    if not words:
        raise UsageError(f"{name} is empty.", hint=_EXAMPLE)
    return words


def _verify(
    one: tuple[str, ...], many: tuple[str, ...], options: VerifyScriptOptions, folder: Path
) -> ScriptComparison:
    """Record both commands into `folder`, and compare them."""
    origin = ScriptRecording(command=many, steps=options.steps, seed=options.seed, has_batches=True)
    print_line(f"many: {shlex.join(many)}", sys.stderr)
    reason = _record(origin, folder / "many", options.wait)
    if reason:
        return _not_compared(reason)
    fed = str(folder / "many") if has_batches(folder / "many") else ""
    origin = ScriptRecording(command=one, steps=options.steps, seed=options.seed, fed=fed)
    print_line(f"one: {shlex.join(one)}", sys.stderr)
    reason = _record(origin, folder / "one", options.wait)
    if reason and fed:
        return _compare_unfed(origin, reason, options, folder)
    return _not_compared(reason) if reason else compare_scripts(folder / "one", folder / "many")


def _compare_unfed(
    origin: ScriptRecording, reason: str, options: VerifyScriptOptions, folder: Path
) -> ScriptComparison:
    """Record the one process with its own batches, because it fails with those of the ranks, and compare it."""
    (folder / "one").rename(folder / "one-fed")
    print_line("one: it fails with the batches of many, so it is recorded with its own", sys.stderr)
    if _record(structs.replace(origin, fed=""), folder / "one", options.wait):
        return _not_compared(reason)
    note = "one was recorded with its own batches, because it fails with those of many"
    comparison = compare_scripts(folder / "one", folder / "many")
    if comparison.verdict != SAME:
        why = f"one fails when it gets the batches of many, and not with its own: {reason}"
        return replace(_not_compared(why), hint="the same shapes of batches in both commands", notes=(note,))
    return replace(comparison, notes=(note, *comparison.notes))


def _not_compared(reason: str) -> ScriptComparison:
    return ScriptComparison(exit_code=int(ExitCode.NOT_JUDGED), verdict=NOT_COMPARABLE, cause=reason)


def _record(origin: ScriptRecording, folder: Path, wait: float) -> str:
    """Record a command; return why the recording is not whole, or ""."""
    recorded = record_script(origin, folder=folder, wait_seconds=wait)
    reason = recorded.reason or recorder_fault(recorded.run)
    return f"{folder.name}: {reason}" if reason else ""
