"""Rollback: after a bad step, the run continues from a state before it, without the samples of this step.

The steps that are left out are in `skipped.jsonl` in the run folder. Each attempt of the run reads this file, so a run
that is started with the file leaves out the same steps.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.comm.collective_errors import run_on_all_ranks
from paceline.console.formatting import plural
from paceline.data.types import StepInput
from paceline.errors import CheckpointError, NonFiniteError, RollbackError, RunError
from paceline.filesystem.atomic_files import parse_json, read_regular, write_text
from paceline.filesystem.disk_full import convert_to_save_error
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.setup.build_training_setup import TrainingSetup

SKIPPED = "skipped.jsonl"


class Rollback:
    """The rollbacks of a run. `left_out` has the steps that this attempt leaves out, the same on all ranks."""

    def __init__(self, *, setup: TrainingSetup, path: Path, left_out: Sequence[int]) -> None:
        self._setup = setup
        self._path = path
        self.left_out = frozenset(left_out)

    def begin(self, error: RunError, step_batch: StepInput) -> RunError:
        """Return the error that ends the attempt after a bad step. Every rank must call this.

        If the run is to roll back, the step and its samples are recorded first, and the error is a `RollbackError`.
        Otherwise, or if too many steps are left out already, it is `error` itself.
        """
        train = self._setup.settings.train
        policy = train.on_nonfinite if isinstance(error, NonFiniteError) else train.on_spike
        if policy != "rollback":
            return error
        if len(self.left_out) >= train.max_rollbacks:
            left_out = plural(len(self.left_out), "step")
            error.hint = f"train.max_rollbacks is {train.max_rollbacks}; left out already: {left_out}"
            return error
        record = self._record(error, step_batch)

        def append_record() -> None:
            if self._setup.world.is_main:
                with convert_to_save_error(SKIPPED, self._path.parent):
                    _append_line(self._path, json.dumps(record))

        run_on_all_ranks(self._setup.world, append_record)  # once the first rank ends, the others are killed
        return RollbackError(
            f"{error.what.removesuffix('.')}: its {len(record['samples'])} samples are left out.",
            cause=error.cause,
            hint=f"{self._path} lists them; the same command continues the run without them",
        )

    def _record(self, error: RunError, step_batch: StepInput) -> dict[str, Any]:
        indices = [index for micro in step_batch.micro for index in micro.indices]
        samples = sorted({index for rank in self._setup.world.gather_json(indices) for index in rank})
        cursor = step_batch.batch.next_cursor
        return {"step": cursor.step, "epoch": cursor.epoch, "samples": samples, "reason": error.what}


def open_rollback(setup: TrainingSetup, run: RunFolder) -> Rollback:
    """Return the rollbacks of a run, with the steps that its file lists. Every rank must call this.

    Raises:
        CheckpointError: the file is damaged. A run that ignored it would train on the samples that it leaves out.
    """
    path = run.path / SKIPPED
    steps = run_on_all_ranks(setup.world, lambda: read_left_out_steps(path) if setup.world.is_main else [])
    return Rollback(setup=setup, path=path, left_out=setup.world.share_json(steps))


def read_left_out_steps(path: Path) -> list[int]:
    """Return the steps that a `skipped.jsonl` lists.

    Raises:
        CheckpointError: the file can't be read, or a line is damaged.
    """
    try:
        text = read_regular(path).decode(errors="replace")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}.", hint="remove it to train on all samples") from None
    return [_left_out_step(line, f"line {number} of {path}") for number, line in enumerate(text.splitlines(), start=1)]


def _left_out_step(line: str, place: str) -> int:
    """Return the step that a line names.

    Raises:
        CheckpointError: it names none.
    """
    try:
        step = parse_json(line)["step"]
    except (ValueError, KeyError, TypeError):
        step = None
    if type(step) is not int or step < 1:
        raise CheckpointError(
            f"{place} does not name a step to leave out.",
            cause="a damaged disk, or an edited file: each line is a JSON object with the key step",
            hint="correct the line, or remove the file to train on all samples",
        )
    return step


def _append_line(path: Path, line: str) -> None:
    """Append a line by an atomic replacement, so that no kill leaves a part of it."""
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    if earlier and not earlier.endswith("\n"):
        earlier += "\n"
    write_text(path, f"{earlier}{line}\n")
