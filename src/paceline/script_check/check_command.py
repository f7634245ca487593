"""The `check` verb: runs an unmodified training script for a few steps, and says whether it trains as it should."""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from paceline.commands.command_table import VerbOutput
from paceline.commands.common.option_checks import refuse_wait
from paceline.console.formatting import plural
from paceline.console.output import print_line
from paceline.errors import ExitCode, UsageError, raise_all
from paceline.script_check.judge.script_run import ScriptRun, read_script_run
from paceline.script_check.judge.verdict import Verdict, judge
from paceline.script_check.recording import has_reached_last_step
from paceline.script_check.script_process import ScriptEnd, describe_command, run_recorded

_NUM_OUTPUT_LINES = 20  # of the command, shown if it fails
_COUNT_OPTIONS = ("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes", "-np")
_EXAMPLE = "paceline check -- torchrun --nproc-per-node 2 train.py"


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Check an unmodified training script: `paceline check -- torchrun --nproc-per-node 2 train.py`."""

    steps: int = 8
    """Number of optimizer steps to record; then the command is ended. 0: until it ends by itself."""
    out: str | None = None
    """A folder for the recording, which must be new or empty; default: a temporary one, which is removed."""
    wait: float = 600.0
    """Seconds without an optimizer step after which the command is ended."""
    json: bool = False
    """Print the result as JSON."""


def run_verb(options: CheckOptions, command: list[str]) -> VerbOutput:
    """Run the verb; `command` is what follows `--`. Return the exit code, the value for `--json`, and the text."""
    _refuse(options)
    folder = Path(options.out) if options.out else Path(tempfile.mkdtemp(prefix="paceline-check-"))
    try:
        verdict, wrappers = check_script(command, options, folder)
    finally:
        if not options.out:
            shutil.rmtree(folder, ignore_errors=True)
    text = describe_verdict(verdict, command, wrappers)
    if not options.json:
        print_line(text)  # to standard output, also with findings: it is the answer
        text = ""
    return verdict.exit_code, verdict, text


def check_script(command: list[str], options: CheckOptions, folder: Path) -> tuple[Verdict, list[str]]:
    """Record a command into `folder`, and return the verdict and the classes around the model."""
    try:
        end = run_recorded(
            command,
            folder=folder,
            steps=options.steps,
            wait_seconds=options.wait,
            environ=os.environ,
            report=lambda text: print_line(text, sys.stderr),
        )
    except OSError as error:
        raise UsageError(f"{command[0]} can't be started: {error.strerror}.", hint=_EXAMPLE) from None
    run = read_script_run(folder)
    if not run.steps:
        return _nothing_recorded(run, end), []
    verdict = judge(run)
    wrappers = sorted({name for step in run.steps for rank in step.ranks for name in rank.wrappers})
    reason = _missing_ranks(run, command)
    if end.exit_code and not end.is_out_of_time and not has_reached_last_step(folder, run.world_size):
        failure = f"the command failed with exit code {end.exit_code} after {plural(run.last_step, 'step')}"
        reason = failure + _shown_output(end)
    if reason:
        code = ExitCode.NOT_JUDGED if verdict.exit_code == ExitCode.DONE else verdict.exit_code
        verdict = replace(verdict, exit_code=int(code), reason=reason)
    return verdict, wrappers


def _missing_ranks(run: ScriptRun, command: Sequence[str]) -> str:
    """Return which ranks have recorded nothing, by their own count and by the command; empty if none is missing."""
    world_size = run.ranks[0].header.world_size
    if world_size > run.world_size:
        return f"{run.world_size} of {plural(world_size, 'rank')} made a step"
    for option, value in zip(command, [*command[1:], ""], strict=True):
        name, _, own_value = option.partition("=")
        value = own_value or value
        if name in _COUNT_OPTIONS and value.isdigit() and int(value) > world_size:
            return (
                f"the command asks for {plural(int(value), 'process')} ({name} {value}), but each process that trains"
                f" belongs to a training of {plural(world_size, 'rank')}. torchrun --nproc-per-node {value} SCRIPT"
                " starts as many"
            )
    return ""


def _refuse(options: CheckOptions) -> None:
    """Raise an error if an option can't be used, or the folder has something in it."""
    raise_all(refuse_wait(options.wait))
    if options.steps < 0:
        raise UsageError(f"--steps {options.steps} can't be negative.", hint="--steps 8")
    if options.out and Path(options.out).exists() and (Path(options.out).is_file() or any(Path(options.out).iterdir())):
        raise UsageError(f"--out {options.out} is not an empty folder.", hint="--out with a new folder")


def _nothing_recorded(run: ScriptRun, end: ScriptEnd) -> Verdict:
    """Return the verdict on a command without a recorded step, with what it printed last."""
    if end.is_out_of_time:
        reason = "no optimizer made a step in time (--wait)"
    elif end.exit_code:
        reason = f"the command ended with exit code {end.exit_code} before an optimizer made a step on all ranks"
    else:
        reason = (
            "the command ended without a step of a torch optimizer on all ranks; weights that are updated by hand, or"
            " by an optimizer that is no torch.optim.Optimizer, can't be seen"
        )
    return Verdict(
        exit_code=int(ExitCode.NOT_JUDGED),
        ranks=run.world_size,
        steps=0,
        findings=[],
        sound=[],
        not_exercised=[],
        reason=reason + _shown_output(end),
    )


def _shown_output(end: ScriptEnd) -> str:
    """Return the first traceback that the command printed, or its last lines."""
    lines = end.output.read_text(errors="replace").splitlines()
    starts = [number for number, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    lines = lines[starts[0] : starts[0] + _NUM_OUTPUT_LINES] if starts else lines[-_NUM_OUTPUT_LINES:]
    return "\n".join(["", "The command printed:", *(f"  {line}" for line in lines)]) if lines else ""


def describe_verdict(verdict: Verdict, command: list[str], wrappers: list[str]) -> str:
    """Return the verdict as text for a person."""
    around = f", {', '.join(wrappers)}" if wrappers else ""
    lines = [describe_command(command)]
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
