"""The batch script for Slurm."""

import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.submit.submission import MAX_RESTARTS, Submission, SubmissionFile, as_shell, fill_template, format_time


def slurm_script(submission: Submission, *, options: Mapping[str, str], array: str = "") -> SubmissionFile:
    """Return the script. `options` are more options of sbatch, by their names without dashes.

    With `array`, such as "1-4", it trains once for each number, each time into its own run folder. In the words of the
    command, `{task}` is then the number.
    """
    path = submission.folder / "job.sh"
    command = as_shell(submission.train_command())
    if array:
        run = shlex.quote(submission.run)
        command = command.replace(f"--run-dir {run}", f"--run-dir {run}/$SLURM_ARRAY_TASK_ID")
        command = command.replace("'{task}'", "$SLURM_ARRAY_TASK_ID").replace("{task}", "$SLURM_ARRAY_TASK_ID")
    more = {**({"array": array} if array else {}), **{name.replace("_", "-"): text for name, text in options.items()}}
    output = submission.folder / ("slurm-%A-%a.out" if array else "slurm-%j.out")
    values = {
        **submission.values(),
        "path": str(path),
        "gpu_option": f" --gpus-per-node={submission.ranks_per_node}" if submission.uses_gpus else "",
        "time_limit": format_time(submission.hours),
        "output": str(output),
        "more_options": "".join(f"\n#SBATCH --{name}={text}" for name, text in more.items()),
        "folder": shlex.quote(str(Path.cwd())),
        "environment": _activation(),
        "container": f" --container-image={shlex.quote(submission.image)}" if submission.image else "",
        "command": command,
        "max_restarts": str(MAX_RESTARTS),
    }
    return SubmissionFile(path=path, text=fill_template("job.sh", values), command=f"sbatch {shlex.quote(str(path))}")


def _activation() -> str:
    """Return the line that activates the virtual environment of this process, if it is in one."""
    activate = Path(sys.prefix) / "bin" / "activate"
    if sys.prefix == sys.base_prefix or not activate.is_file():
        conda = os.environ.get("CONDA_PREFIX")
        return f"\nexport PATH={shlex.quote(conda)}/bin:$PATH" if conda else ""
    return f"\nsource {shlex.quote(str(activate))}"
