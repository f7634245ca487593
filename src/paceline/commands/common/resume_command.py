"""The command that goes on with a run: the same words, less what broke it."""

import shlex
from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import was_saved
from paceline.config.loading import as_typed
from paceline.config.secret_settings import mask_value
from paceline.config.task import Task
from paceline.launch.environments import JoinedWorld
from paceline.run_folder.run_folder import RunFolder


def command_again(task: Task, joined: JoinedWorld | None = None) -> str:
    """`paceline train` with the run's folder and every setting that was given; faults are not asked for again.

    A secret is not said again: dots stand for it.
    In a world that a launcher made the launcher comes first; how machines meet is not known here.
    """
    if task.job_handle is not None:
        return f"pl.train(job, run_dir={task.run!r}, ...) with the same arguments"
    words = ["paceline", "train", task.job, "--run-dir", task.run]
    if joined is None:
        words += ["--ranks", str(task.ranks)]
    else:
        words = [*joined.launcher, *(["-m"] if joined.kind == "torchrun" else []), *words]
    if task.layout != ("single" if task.ranks == 1 else "ddp"):
        words += ["--layout", task.layout]
    if task.update != "sync":
        words += ["--update", task.update]
    if task.compress != "none":
        words += ["--compress", task.compress]
    files = {origin.removeprefix("file ") for origin in task.origins.values() if origin.startswith("file ")}
    for file in sorted(files):
        words += ["--config", file]
    for name, value in task.settings.items():
        if task.origins.get(name) in ("command line", "auto") and name != "run_dir":
            words += [f"--{name}", mask_value(name, as_typed(value))]
    return shlex.join(words)


def command_with(task: Task) -> str:
    """The same of a task whose microbatches are others than those that it saved with, which it has to be told."""
    cut = " --allow micro_batch_size" if was_saved(RunFolder(Path(task.run)).checkpoints) else ""
    return command_again(task) + cut
