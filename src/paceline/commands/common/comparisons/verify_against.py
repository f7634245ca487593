"""`verify --against`: compares a layout with another layout, or with a recording, for models that no process holds.

Each layout trains freely for a few steps from the same start, on the same samples in the same microbatches, and records
fingerprints of whole gradients and weights. The recordings are compared as those of `pl.record` are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.commands.common.comparisons.compare_layouts import num_replicas, set_micro_batch_size
from paceline.commands.common.dry_run import check_start
from paceline.commands.common.execution import CommandOutcome, RunOptions, execute, make_task, read_result
from paceline.commands.common.start_folder import assign_run_folder
from paceline.config.layout import parse_layout
from paceline.config.parse_auto_layout import is_auto
from paceline.config.task import Task
from paceline.config.update_rule import parse_update
from paceline.console.formatting import plural
from paceline.console.output import print_line
from paceline.errors import ExitCode, LayoutError, UsageError
from paceline.filesystem.atomic_files import write_json
from paceline.run_folder.run_folder import RunFolder
from paceline.verification.fingerprints.compare_recordings import Comparison, compare_recordings
from paceline.verification.fingerprints.fingerprint import Record, has_recording, read_recording
from paceline.verification.rung_result import RECORDING_FLOOR, RungResult
from paceline.verification.verify_answer import Rung, verify_answer

ENTRY = "paceline.verification.fingerprints.record_layout:record_layout"
_REFERENCE_FOLDER = "reference"  # in the run folder


@dataclass(frozen=True, kw_only=True)
class _Recorded:
    """A layout that was recorded. `outcome` is set if its processes failed."""

    task: Task
    micro_batch_size: int | None = None
    outcome: CommandOutcome | None = None


def verify_against(
    job: str, *, common: RunOptions, overrides: Sequence[str], steps: int, against: str
) -> CommandOutcome:
    """Compare the training of `job` in a layout with that in another layout, or with a recorded run.

    Raises:
        UsageError, LayoutError: `against` is neither, or the update rule is not synchronous.
    """
    _refuse(common, against)
    is_recording = has_recording(Path(against))
    task = make_task("verify", job, common, overrides)
    reference_task = task if is_recording else _reference_task(job, common, overrides, against)
    if common.dry_run:
        screens = [check_start(each) for each in (reference_task, task)]
        return CommandOutcome(exit_code=0, run=Path(task.run), value=task.as_json(), screen=screens[-1])
    task = assign_run_folder(replace(task, options={"steps": steps}), resume=None)
    reference_task = replace(reference_task, options={"steps": steps}, run=str(Path(task.run) / _REFERENCE_FOLDER))
    tasks = {"layout": task} if is_recording else {"layout": task, "reference": reference_task}
    recorded: dict[str, _Recorded] = {}
    micro_batch_size: int | None = None
    for name, each in sorted(tasks.items(), key=lambda item: -num_replicas(item[1])):
        recorded[name] = _record(set_micro_batch_size(each, micro_batch_size), common)
        if (failed := recorded[name].outcome) is not None:
            return failed
        micro_batch_size = recorded[name].micro_batch_size
    folder = Path(against) if is_recording else Path(reference_task.run)
    reference = f"the recording {against}" if is_recording else f"{against} on {plural(reference_task.ranks, 'rank')}"
    answer = _answer(task, folder, reference=reference, micro_batch_size=micro_batch_size or 0)
    write_json(RunFolder(Path(task.run)).answer("verify"), answer)
    code = ExitCode.DIFFERENT if answer["first_difference"] else ExitCode.DONE
    return CommandOutcome(exit_code=int(code), run=Path(task.run), value=answer, screen="\n".join(answer["lines"]))


def _refuse(common: RunOptions, against: str) -> None:
    if common.compress != "none" or not parse_update(common.update).is_synchronous:
        raise UsageError(
            "verify --against compares layouts of synchronous training.",
            cause="an update rule or compressed gradients have a reference of their own",
            hint="verify without --against",
        )
    if common.layout is None or is_auto(common.layout):
        raise UsageError(
            "verify --against needs --layout, which is compared.", hint=f"--layout fsdp --against {against}"
        )
    if common.run_dir is not None and Path(common.run_dir).resolve() == Path(against).resolve():
        raise UsageError(
            f"--run-dir {common.run_dir} is the recording that --against names: it would be overwritten.",
            hint="--run-dir with another folder",
        )
    if not has_recording(Path(against)):
        if Path(against).is_dir():
            raise UsageError(
                f"{against} has no recording.",
                cause="only `verify --against` and `pl.record` write one",
                hint="--against LAYOUT, such as --against ddp",
            )
        if parse_layout(against) == parse_layout(common.layout):
            raise LayoutError("--against names the layout itself.", hint="--against another layout")


def _reference_task(job: str, common: RunOptions, overrides: Sequence[str], against: str) -> Task:
    return make_task("verify", job, replace(common, layout=against), overrides)


def _record(task: Task, common: RunOptions) -> _Recorded:
    """Train and record a layout in its run folder."""
    Path(task.run).mkdir(parents=True, exist_ok=True)
    RunFolder(Path(task.run)).answer("record").unlink(missing_ok=True)  # of an earlier command in this folder
    if not common.quiet:
        print_line(f"verify: {task.layout} on {plural(task.ranks, 'rank')}")
    outcome = execute(task, entry=ENTRY, common=replace(common, quiet=True), one_thread=True)
    value = read_result(task, "record")
    if value is None or outcome.exit_code:
        return _Recorded(task=task, outcome=outcome)
    return _Recorded(task=task, micro_batch_size=int(value["micro_batch_size"]))


def _answer(task: Task, reference_folder: Path, *, reference: str, micro_batch_size: int) -> dict[str, Any]:
    records = read_recording(Path(task.run)).records
    comparison = compare_recordings(read_recording(reference_folder).records, records, same_ranks=False)
    rung = Rung(
        name="free running",
        rules_out="gradients or weights that differ from those of the reference",
        result=_rung_result(comparison, records),
    )
    return verify_answer(
        rungs=[rung],
        layout=task.layout,
        update=task.update,
        ranks=task.ranks,
        steps=comparison.steps,
        micro_batch_size=micro_batch_size,
        reference=reference,
    )


def _rung_result(comparison: Comparison, records: Sequence[Record]) -> RungResult:
    result = RungResult(noise_floor=RECORDING_FLOOR, detail=comparison.text)
    result.count_compared("gradients", sum(len(record.gradients) for record in records))
    result.count_compared("weights", sum(len(record.weights) for record in records))
    first = comparison.first
    if first is None:
        result.verdict, result.max_difference = comparison.verdict, comparison.max_distance
        return result
    result.max_difference = float(first.get("distance", float("inf")))
    result.record_difference(step=int(first["step"]), parameter=str(first["parameter"]), cause=str(first["cause"]))
    return result
