"""Record the run of a command, and say why the recording is not whole, if it isn't."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from paceline.console.formatting import plural
from paceline.console.output import print_line
from paceline.errors import UsageError
from paceline.script_check.judge.script_run import ScriptRun, read_script_run
from paceline.script_check.recording import ScriptRecording, has_reached_last_step
from paceline.script_check.script_process import ScriptEnd, run_recorded

_NUM_OUTPUT_LINES = 20  # of the command, shown if it fails
_LAUNCHER_ERROR = "ChildFailedError"  # of torchrun
_TRACEBACK = "Traceback (most recent call last)"
_COUNT_OPTIONS = ("--nproc-per-node", "--nproc_per_node", "--num_processes", "--num-processes", "-np")


@dataclass(frozen=True, kw_only=True)
class RecordedScript:
    """A recorded run. `reason` says why it is not whole: no step, a failed command, missing ranks; "" if it is."""

    run: ScriptRun
    reason: str = ""

    @property
    def wrappers(self) -> list[str]:
        """The classes around the model."""
        return sorted({name for step in self.run.steps for rank in step.ranks for name in rank.wrappers})


def refuse_options(*, steps: int, wait: float, out: str | None) -> None:
    """Raise an error if an option can't be used, or the folder has something in it."""
    if steps < 0 or wait <= 0:
        raise UsageError("--steps can't be negative, and --wait must be positive.", hint="--steps 8 --wait 600")
    if out and Path(out).exists() and (Path(out).is_file() or any(Path(out).iterdir())):
        raise UsageError(f"--out {out} is not an empty folder.", hint="--out with a new folder")


def record_script(origin: ScriptRecording, *, folder: Path, wait_seconds: float) -> RecordedScript:
    """Run a command with the recorder in it, and read what it recorded into `folder`.

    Raises:
        UsageError: the command can't be started.
    """
    try:
        end = run_recorded(
            origin,
            folder=folder,
            wait_seconds=wait_seconds,
            environ=os.environ,
            report=lambda text: print_line(text, sys.stderr),
        )
    except OSError as error:
        raise UsageError(
            f"{origin.command[0]} can't be started: {error.strerror}.", hint="-- torchrun --nproc-per-node 2 train.py"
        ) from None
    run = read_script_run(folder)
    if not run.steps:
        return RecordedScript(run=run, reason=_nothing_recorded(end))
    reason = _missing_ranks(run, origin.command)
    if end.exit_code and not end.is_out_of_time and not has_reached_last_step(folder, run.world_size):
        failure = f"the command failed with exit code {end.exit_code} after {plural(run.last_step, 'step')}"
        reason = failure + _shown_output(end)
    return RecordedScript(run=run, reason=reason)


def _nothing_recorded(end: ScriptEnd) -> str:
    """Return why a command has no recorded step, with what it printed last."""
    if end.is_out_of_time:
        reason = "no optimizer made a step in time (--wait)"
    elif end.exit_code:
        reason = f"the command ended with exit code {end.exit_code} before an optimizer made a step on all ranks"
    else:
        reason = (
            "the command ended without a step of a torch optimizer on all ranks; weights that are updated by hand, or"
            " by an optimizer that is no torch.optim.Optimizer, can't be seen"
        )
    return reason + _shown_output(end)


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


def _shown_output(end: ScriptEnd) -> str:
    """Return the first traceback that the command printed, or its last lines."""
    lines = end.output.read_text(errors="replace").splitlines()
    traceback = _first_traceback(lines)
    if traceback and _LAUNCHER_ERROR in traceback[-1]:  # it only says that a rank failed, and the rank said why before
        lines, traceback = lines[: lines.index(traceback[0])], []
    lines = traceback or lines[-_NUM_OUTPUT_LINES:]
    return "\n".join(["", "The command printed:", *(f"  {line}" for line in lines)]) if lines else ""


def _first_traceback(lines: Sequence[str]) -> list[str]:
    """Return the first traceback with its exception, of a long one the end; lines of other ranks may lie between."""
    start = next((number for number, line in enumerate(lines) if _TRACEBACK in line), len(lines))
    found = list[str]()
    prefix = lines[start].partition(_TRACEBACK)[0] if start < len(lines) else ""
    for line in lines[start:]:
        if line.startswith(prefix):
            found.append(line)
            text = line[len(prefix) :]
            if len(found) > 1 and text and not text.startswith(" "):
                break
    middle = ["  ..."] if len(found) > _NUM_OUTPUT_LINES else []
    return [*found[:1], *middle, *found[1:][-_NUM_OUTPUT_LINES + 2 :]]
