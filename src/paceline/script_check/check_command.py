"""The `check` verb: runs an unmodified training script for a few steps, and says whether it trains as it should."""

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.commands.command_table import VerbOutput
from paceline.console.formatting import plural
from paceline.console.output import print_line
from paceline.errors import ExitCode
from paceline.script_check.judge.verdict import Verdict, judge
from paceline.script_check.recorded_script import RecordedScript, record_script, refuse_options
from paceline.script_check.recording import ScriptRecording
from paceline.script_check.script_process import describe_command


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Check an unmodified training script: `paceline check -- torchrun --nproc-per-node 2 train.py`."""

    steps: int = 8
    """Number of optimizer steps to record; then the command is ended. 0: until it ends by itself."""
    every: int = 1
    """Summarize gradients and weights only at every n-th step, which costs less; at the first and last ones, too."""
    out: str | None = None
    """A folder for the recording, which must be new or empty; default: a temporary one, which is removed."""
    wait: float = 600.0
    """Seconds without an optimizer step after which the command is ended."""
    json: bool = False
    """Print the result as JSON."""


def run_verb(options: CheckOptions, command: list[str]) -> VerbOutput:
    """Run the verb; `command` is what follows `--`. Return the exit code, the value for `--json`, and the text."""
    refuse_options(steps=options.steps, every=options.every, wait=options.wait, out=options.out)
    folder = Path(options.out) if options.out else Path(tempfile.mkdtemp(prefix="paceline-check-"))
    try:
        verdict, wrappers = check_script(command, options, folder)
    finally:
        if not options.out:
            shutil.rmtree(folder, ignore_errors=True)
    text = f"{describe_command(command)}\n{describe_verdict(verdict, wrappers)}"
    if not options.json:
        print_line(text)  # to standard output, also with findings: it is the answer
        text = ""
    return verdict.exit_code, verdict, text


def check_script(command: list[str], options: CheckOptions, folder: Path) -> tuple[Verdict, list[str]]:
    """Record a command into `folder`, and return the verdict and the classes around the model."""
    origin = ScriptRecording(command=tuple(command), steps=options.steps, every=options.every)
    recorded = record_script(origin, folder=folder, wait_seconds=options.wait)
    if not recorded.run.steps:
        return _nothing_recorded(recorded), []
    verdict = judge(recorded.run)
    if recorded.reason:
        code = ExitCode.NOT_JUDGED if verdict.exit_code == ExitCode.DONE else verdict.exit_code
        verdict = replace(verdict, exit_code=int(code), reason=recorded.reason)
    return verdict, recorded.wrappers


def _nothing_recorded(recorded: RecordedScript) -> Verdict:
    """Return the verdict on a command without a recorded step."""
    return Verdict(
        exit_code=int(ExitCode.NOT_JUDGED),
        ranks=recorded.run.world_size,
        steps=0,
        findings=[],
        sound=[],
        not_exercised=[],
        reason=recorded.reason,
    )


def describe_verdict(verdict: Verdict, wrappers: list[str]) -> str:
    """Return the verdict as text for a person."""
    around = f", {', '.join(wrappers)}" if wrappers else ""
    lines = []
    if verdict.steps:
        lines.append(f"{plural(verdict.steps, 'step')} of {plural(verdict.ranks, 'rank')}{around}")
    for finding in verdict.findings:
        where = f" ({finding.line})" if finding.line else ""
        since = f"from step {finding.step} on: " if finding.step else ""
        lines.append(f"{'note ' if finding.is_note else 'WRONG'}  {since}{finding.text}{where}")
        if finding.hint:
            lines.append(f"       to do: {finding.hint}")
    lines += [f"ok     {text}" for text in verdict.sound]
    lines += [f"not exercised: {text}" for text in verdict.not_exercised]
    lines.append(_last_line(verdict))
    return "\n".join(lines)


def _last_line(verdict: Verdict) -> str:
    count = sum(not finding.is_note for finding in verdict.findings)
    if count:
        return f"{plural(count, 'finding')}.{f' And {verdict.reason}' if verdict.reason else ''}"
    return f"CAN'T BE JUDGED: {verdict.reason}" if verdict.reason else "No finding."
