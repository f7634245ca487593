"""The batch script for Slurm."""

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from paceline.submit.submission import MAX_RESTARTS, Submission, SubmissionFile, fill_template, format_time

TASK = "{task}"
"""The place of the number of an array's task in a word of the command."""
_ARRAY = re.compile(r"(\d{1,7}(-\d{1,7})?)(,\d{1,7}(-\d{1,7})?)*(%[1-9]\d*)?", re.ASCII)
_MAX_TASK = 4_000_000  # the largest number that any configuration of Slurm allows
_THIS_JOB = '"$SLURM_JOB_ID"'
_THIS_TASK = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"'  # the SLURM_JOB_ID of one task means the whole array


def slurm_script(submission: Submission, *, options: Mapping[str, str], array: str = "") -> SubmissionFile:
    """Return the script. `options` are more options of sbatch, by their names without dashes.

    With `array`, such as "1-4", it trains once for each number, each time into its own run folder. In the words of the
    command, `{task}` is then the number.
    """
    path = submission.folder / "job.sh"
    more = {**({"array": array} if array else {}), **{name.replace("_", "-"): text for name, text in options.items()}}
    output = str(submission.folder).replace("%", "%%") + ("/slurm-%A-%a.out" if array else "/slurm-%j.out")
    values = {
        **submission.values(),
        "path": shlex.quote(str(path)),
        "gpu_option": f" --gpus-per-node={submission.ranks_per_node}" if submission.uses_gpus else "",
        "time_limit": format_time(submission.hours),
        "output": shlex.quote(output),
        "more_options": "".join(f"\n#SBATCH --{name}={shlex.quote(text)}" for name, text in more.items()),
        "folder": shlex.quote(str(Path.cwd())),
        "environment": "" if submission.image else _activation(),
        "container": _container_options(submission.image),
        "command": _command_line(submission, is_array=bool(array)),
        "max_restarts": str(MAX_RESTARTS),
        "requeued": _THIS_TASK if array else _THIS_JOB,
    }
    return SubmissionFile(path=path, text=fill_template("job.sh", values), command=f"sbatch {values['path']}")


def array_tasks(text: str) -> set[int]:
    """Return the numbers of the tasks of an array, such as 1, 2 and 5 for "1-2,5%4"; none if sbatch would refuse it."""
    if not _ARRAY.fullmatch(text):
        return set()
    parts = [part.partition("-") for part in text.partition("%")[0].split(",")]
    ranges = [range(int(first), int(last or first) + 1) for first, _, last in parts]
    if any(not numbers or numbers[-1] > _MAX_TASK for numbers in ranges):
        return set()
    return {number for numbers in ranges for number in numbers}


def _command_line(submission: Submission, *, is_array: bool) -> str:
    """Return the command as a line for a shell, which puts in the number of the task."""
    if not is_array:
        return shlex.join(submission.train_command())
    words = replace(submission, run=f"{submission.run}/{TASK}").train_command()
    parts = ([shlex.quote(part) if part else "" for part in word.split(TASK)] for word in words)
    return " ".join('"$SLURM_ARRAY_TASK_ID"'.join(part) for part in parts)


def _container_options(image: str) -> str:
    """Return the options with which the plugin pyxis runs a command in an image, in this folder."""
    if not image:
        return ""
    mounts = '"$PWD:$PWD" --container-workdir="$PWD"'
    return f" --container-image={shlex.quote(image)} --container-mounts={mounts}"


def _activation() -> str:
    """Return the line that activates the virtual environment of this process, if it is in one."""
    activate = Path(sys.prefix) / "bin" / "activate"
    if sys.prefix == sys.base_prefix or not activate.is_file():
        conda = os.environ.get("CONDA_PREFIX")
        return f"\nexport PATH={shlex.quote(conda)}/bin:$PATH\n" if conda else ""
    return f"\nsource {shlex.quote(str(activate))}\n"
