"""The command that resumes a run: its job, run folder, ranks, device, layout, update rule, compression and settings."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.checkpoint.files.checkpoint_folder import has_saves
from paceline.commands.common.devices import choose_device, choose_ranks_of_nodes
from paceline.config.layout import parse_layout
from paceline.config.merge_settings import as_command_text
from paceline.config.secret_settings import mask_value
from paceline.config.task import Task
from paceline.config.update_rule import parse_update
from paceline.errors import UsageError
from paceline.launch.launcher_variables import JoinedWorld
from paceline.nodes.node_place import DEFAULT_PORT, NodePlace, split_counts
from paceline.nodes.slurm_hosts import step_hosts
from paceline.run_folder.run_folder import RunFolder, find_run, read_task


def build_resume_command(task: Task, joined: JoinedWorld | None = None) -> str:
    """Return `paceline train` with the run folder and every requested setting, without the injected faults.

    The device is named only if `--device auto` would choose another one. A secret is masked with dots. Under another
    launcher or on several nodes, the text begins with the launcher's command, or with an instruction for each node. A
    task without a run folder resumes the newest run.
    """
    if task.job_handle is not None:
        return f"pl.train(job, run_dir={task.run!r}, ...) with the same arguments"
    command = ["paceline", "train", task.job, *(["--run-dir", task.run] if task.run else ["--resume"])]
    is_played = bool(task.nodes) and split_counts(task.nodes)[0] == task.nodes  # one command has started all nodes
    is_step = _is_slurm_step(task)
    if is_step:
        num_nodes = split_counts(task.nodes)[1]
        command = ["srun", "--nodes", str(num_nodes), "--ntasks-per-node", "1", *command]
        command += _ranks_per_node(task, is_played=False)
    elif task.nodes:
        command += ["--nodes", task.nodes, *_ranks_per_node(task, is_played=is_played)]
    elif joined is None:
        command += ["--ranks", str(task.ranks)]
    elif joined.kind == "torchrun":
        command = ["-m", *command]
    if task.device != choose_device("auto", []):
        command += ["--device", task.device]
    if task.layout != ("single" if task.ranks == 1 else "ddp"):
        command += ["--layout", task.layout]
    if task.update != "sync":
        command += ["--update", _update_as_typed(task)]
    if task.compress != "none":
        command += ["--compress", task.compress]
    files = {origin.removeprefix("file ") for origin in task.origins.values() if origin.startswith("file ")}
    for file in sorted(files):
        command += ["--config", file]
    for name, value in task.settings.items():
        if task.origins.get(name) in ("command line", "auto") and name != "run_dir":
            command += [f"--{name}", mask_value(name, as_command_text(value))]
    if task.nodes and not is_played and not is_step:
        return f"on every node: {shlex.join(command)}"
    return shlex.join(command) if joined is None else joined.launch_command(command)


def _is_slurm_step(task: Task) -> bool:
    """Return whether the nodes are those of this Slurm step; the next step may have other ones."""
    if not task.nodes:
        return False
    try:
        hosts = step_hosts(os.environ)
    except (KeyError, ValueError):
        return False
    place = f"{len(hosts)}:{hosts[0] if hosts else ''}:"
    return f"{task.nodes}:".startswith(place)


def _ranks_per_node(task: Task, *, is_played: bool) -> list[str]:
    """Return the option for the ranks of each node. If one machine plays all nodes, the default is left out."""
    num_nodes = split_counts(task.nodes)[1]
    place = NodePlace(num_nodes=num_nodes, head_host="", port=DEFAULT_PORT, node=0)
    ranks = task.requested_ranks or task.ranks
    if is_played and ranks == choose_ranks_of_nodes(None, place, parse_layout(task.layout), task.device, []):
        return []
    return ["--ranks-per-node", str(ranks // num_nodes)]


def _update_as_typed(task: Task) -> str:
    """Return the update rule as it was typed, unless it was changed since."""
    is_same = bool(task.typed_update) and str(parse_update(task.typed_update)) == task.update
    return task.typed_update if is_same else task.update


def build_retry_command(task: Task) -> str:
    """Return the resume command of a task with a changed microbatch size, with `--allow` if a checkpoint exists."""
    allow_option = " --allow micro_batch_size" if has_saves(RunFolder(Path(task.run)).checkpoints) else ""
    return build_resume_command(task) + allow_option


def missing_job_error(arguments: Sequence[str]) -> UsageError:
    """Return the error for `paceline train` with `--resume` and without a job, with the job that the run names."""
    resume = next(
        (
            word.partition("=")[2] or following
            for word, following in zip(arguments, [*arguments[1:], ""], strict=False)
            if word.partition("=")[0] == "--resume"
        ),
        "",
    )
    others = [word for word in arguments if word not in ("--resume", resume, f"--resume={resume}")]
    if Path(resume.partition(":")[0]).suffix == ".py":
        line = shlex.join(["paceline", "train", resume, *others, "--resume"])
        return UsageError("train needs the job before --resume.", cause=f"{resume} is a job, and no run", hint=line)
    words = ["--resume"] if resume == "newest" else ["--resume", resume]
    try:
        run, checkpoint = find_run(None if resume == "newest" else resume, only_trained=True)
        task = read_task(run)
    except UsageError as error:
        line = shlex.join(["paceline", "train", "job.py", *others, "--resume"])
        cause = error.cause or "without a path, the newest run of the job is resumed"
        return UsageError(f"train needs the job, also with --resume; {error.what}", cause=cause, hint=line)
    line = shlex.join(["paceline", "train", task.job, *words, *others])
    if checkpoint is None and not others:  # as it was started
        line = build_resume_command(replace(task, run=str(run.path)))
    return UsageError("train needs the job, also with --resume.", cause=f"{run.path} trained {task.job}", hint=line)
