"""The `record` verb: runs an unmodified training script for a few steps, and keeps fingerprints of them to compare."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.commands.command_table import VerbOutput
from paceline.console.formatting import plural
from paceline.errors import ExitCode, UsageError
from paceline.script_check.judge.script_run import ScriptRun
from paceline.script_check.recorded_script import RecordedScript, record_script, refuse_options
from paceline.script_check.recording import ScriptRecording, has_batches, read_origin
from paceline.script_check.script_process import describe_command


@dataclass(frozen=True, kw_only=True)
class RecordOptions:
    """Record an unmodified training script, to compare it with another: `paceline compare one two`."""

    out: str
    """The folder for the recording, which must be new or empty."""
    steps: int = 8
    """Number of optimizer steps to record; then the command is ended. 0: until it ends by itself."""
    every: int = 1
    """Summarize gradients and weights only at every n-th step, which costs less; at the first and last ones, too."""
    seed: int | None = None
    """Seed random numbers before the first line of the script, for scripts that seed nothing."""
    batches: bool = False
    """Keep the batches, so that another run can get them: `--feed`."""
    feed: str | None = None
    """A recording with batches, which the script gets in place of its own. Its result is only for comparing."""
    wait: float = 600.0
    """Seconds without an optimizer step after which the command is ended."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class RecordedSummary:
    """The summary of a recording; its fields are the keys of `--json`. `exit_code` is 5 if it is not whole, else 0."""

    exit_code: int
    out: str
    ranks: int
    steps: int
    reason: str = ""


def run_verb(options: RecordOptions, command: list[str]) -> VerbOutput:
    """Run the verb; `command` is what follows `--`. Return the exit code, the value for `--json`, and the text."""
    refuse_options(steps=options.steps, every=options.every, wait=options.wait, out=options.out)
    origin = ScriptRecording(
        command=tuple(command),
        steps=options.steps,
        every=options.every,
        seed=options.seed,
        has_batches=options.batches,
        fed="" if options.feed is None else refuse_feed(options.feed),
    )
    recorded = record_script(origin, folder=Path(options.out), wait_seconds=options.wait)
    reason = recorded.reason or recorder_fault(recorded.run)
    summary = RecordedSummary(
        exit_code=int(ExitCode.NOT_JUDGED if reason else ExitCode.DONE),
        out=options.out,
        ranks=recorded.run.world_size,
        steps=recorded.run.last_step,
        reason=reason,
    )
    return summary.exit_code, asdict(summary), _describe(summary, recorded, origin)


def recorder_fault(run: ScriptRun) -> str:
    """Return why the recorder of a rank has stopped; "" if none has."""
    return next((f"the recorder failed: {rank.fault}" for rank in run.ranks if rank.fault), "")


def refuse_feed(feed: str) -> str:
    """Return the folder of a recording with batches.

    Raises:
        UsageError: it has none.
    """
    if read_origin(Path(feed)) is None or not has_batches(Path(feed)):
        raise UsageError(
            f"--feed {feed} is no recording with batches.",
            cause="batches are kept only on request",
            hint=f"paceline record --out {feed} --batches -- COMMAND",
        )
    return feed


def _describe(summary: RecordedSummary, recorded: RecordedScript, origin: ScriptRecording) -> str:
    around = f", {', '.join(recorded.wrappers)}" if recorded.wrappers else ""
    fed = f", with the batches of {origin.fed}" if origin.fed else ""
    lines: list[Any] = [describe_command(origin.command)]
    if summary.steps:
        lines.append(f"{plural(summary.steps, 'step')} of {plural(summary.ranks, 'rank')}{around}{fed}: {summary.out}")
    if summary.reason:
        lines.append(f"NOT WHOLE: {summary.reason}")
    else:
        lines.append(f"to compare: paceline compare {summary.out} OTHER")
    return "\n".join(lines)
