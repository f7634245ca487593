"""The `submit` verb: writes and checks the file that hands a training in to Slurm, Kubernetes, Ray or SageMaker."""

import json
import math
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro

from paceline.commands.command_table import VerbOutput
from paceline.commands.common.execution import RunOptions, make_task
from paceline.config.job_reference import short_name
from paceline.config.merge_settings import read_requested_settings
from paceline.config.parse_auto_layout import is_auto
from paceline.console.formatting import closest_word, plural
from paceline.console.output import print_line
from paceline.errors import PacelineError, UsageError, raise_all
from paceline.nodes.launcher_options import count_part
from paceline.nodes.node_place import DEFAULT_PORT, NodePlace
from paceline.submit.crd_checks import check_against_schema, read_crd_schema
from paceline.submit.follow_kubernetes import follow_kubernetes
from paceline.submit.follow_slurm import follow_slurm
from paceline.submit.kubernetes_checks import check_kubernetes
from paceline.submit.kubernetes_files import kubernetes_file
from paceline.submit.ray_script import check_ray_script, ray_script
from paceline.submit.sagemaker_request import check_sagemaker, sagemaker_file
from paceline.submit.slurm_option_hints import TARGET_NAMES
from paceline.submit.slurm_script import TASK, slurm_script
from paceline.submit.submission import Submission, SubmissionFile, write_submission
from paceline.submit.target_options import (
    read_kubernetes_options,
    read_ray_options,
    read_sagemaker_options,
    read_slurm_options,
)

_TARGETS = ("slurm", "k8s", "ray", "sagemaker")
_NODES = re.compile(r"(\d+)(?::(\d+))?")
_ARRAY = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*(%\d+)?")
_MIN_HOURS = 0.1
_POD_FOLDER = "/runs"  # where pods mount the volume of the runs


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """Write the file that hands a training in to a scheduler, and check it."""

    job: Annotated[str, tyro.conf.Positional]
    """job.py, job.py:NAME or pkg.module:NAME, as the nodes see it."""
    to: str = "slurm"
    """slurm, k8s, ray or sagemaker."""
    nodes: str | None = None
    """Number of machines; default: 1. Ray: 2:4 for 2 to 4 of them, as many as the cluster has."""
    ranks_per_node: int | None = None
    """Number of processes, and of GPUs, on each machine; default: 1."""
    hours: float = 24.0
    """The time limit."""
    using: tuple[str, ...] = ()
    """Options that only this scheduler has: --using partition=gpu account=me (docs/submit.md)."""
    image: str = ""
    """The container image; in Slurm, it needs the plugin pyxis."""
    array: str = ""
    """Slurm: train once for each of these numbers, such as 1-4. `{task}` in a setting is the number."""
    price: float | None = None
    """The price of one machine for an hour; the largest possible cost is printed."""
    budget: float | None = None
    """Refuse a job that may cost more, at `--price`."""
    layout: str | None = None
    """As for `paceline train`."""
    update: str = "sync"
    """As for `paceline train`."""
    compress: str = "none"
    """As for `paceline train`."""
    device: str = "cuda"
    """cuda, or cpu for machines without GPUs."""
    config: Path | None = None
    """A TOML file of settings."""
    run_dir: str | None = None
    """The run folder, which all nodes see. The file is written to its folder `submit`."""
    follow: bool = False
    """Slurm, Kubernetes: hand the job in, and print its output until it ends."""
    json: bool = False
    """Print the result as JSON."""

    @property
    def nodes_text(self) -> str:
        """The number of machines as it was typed, or the default."""
        return "1" if self.nodes is None else self.nodes

    @property
    def num_ranks(self) -> int:
        """The number of processes on each machine."""
        return 1 if self.ranks_per_node is None else self.ranks_per_node

    @property
    def num_nodes(self) -> int:
        """The number of machines, or the smallest one; 0 if it can't be read."""
        return self.node_counts[0]

    @property
    def node_counts(self) -> range:
        """The possible numbers of machines; 0 alone if they can't be read."""
        match = _NODES.fullmatch(self.nodes_text)
        if match is None or int(match[1]) > int(match[2] or match[1]):
            return range(1)
        return range(int(match[1]), int(match[2] or match[1]) + 1)


def run_verb(options: SubmitOptions, settings: list[str]) -> VerbOutput:
    """Run the verb; return the exit code, the value for `--json`, and the text."""
    raise_all(_option_problems(options))
    _check_training(options, settings)
    submission = _submission(options, settings)
    file, problems = _make_file(options, submission)
    if problems:
        text = "\n".join(f"  {problem}" for problem in problems)
        raise UsageError(
            f"{file.path.name} would be refused:\n{text}", hint="paceline submit --help, or docs/submit.md"
        )
    write_submission(file)
    value = {
        "file": str(file.path),
        "command": file.command,
        "name": file.job_name or submission.name,
        "run": submission.run,
    }
    own_run = [f"run folder on the machines: {submission.run}"] if options.to == "k8s" else []
    lines = [f"wrote {file.path}", *own_run, *_size_lines(options), *_cost_lines(options)]
    if options.follow:
        for line in lines:
            _report(line)
        return _follow(options, submission, file), value, ""
    return 0, value, "\n".join([*lines, f"To hand it in: {file.command}"])


def _follow(options: SubmitOptions, submission: Submission, file: SubmissionFile) -> int:
    """Hand the job in, print its output until it ends, and return the exit code of the training."""
    if options.to == "slurm":
        return follow_slurm(file.path, report=_report)
    kind = read_kubernetes_options(options.using).kind
    return follow_kubernetes(file, name=submission.name, kind=kind, num_nodes=submission.num_nodes, report=_report)


def _option_problems(options: SubmitOptions) -> list[PacelineError]:
    """Return errors for options that contradict each other, or that the scheduler does not have."""
    problems: list[PacelineError] = []
    if options.to not in _TARGETS:
        meant = TARGET_NAMES.get(options.to.lower()) or closest_word(options.to.lower(), _TARGETS)
        cause = f"did you mean {meant!r}?" if meant else ""
        problems.append(UsageError(f"--to {options.to}.", cause=cause, hint=f"--to {meant or ' | '.join(_TARGETS)}"))
    if options.num_nodes <= 0:
        problems.append(_nodes_problem(options))
    for name, value in (("ranks-per-node", options.num_ranks), ("hours", options.hours)):
        if value <= 0:
            problems.append(UsageError(f"--{name} {value:g} must be positive.", hint=f"--{name} 1"))
    if len(options.node_counts) > 1 and options.to != "ray":
        hint = f"--nodes {options.node_counts[-1]}, or --to ray"
        what = f"--nodes {options.nodes}: only Ray changes the number of machines."
        problems.append(UsageError(what, hint=hint))
    if options.to == "ray" and options.image:
        hint = "the image is that of the cluster; leave --image out"
        problems.append(UsageError("--image is not for Ray.", hint=hint))
    if options.to in ("k8s", "sagemaker") and not options.image:
        hint = "--image REGISTRY/NAME:TAG; docs/containers.md builds one"
        problems.append(UsageError(f"--to {options.to} needs a container image.", hint=hint))
    if options.to == "slurm" and 0 < options.hours < _MIN_HOURS:
        what = f"--hours {options.hours:g} is too short: Slurm signals the ranks three minutes before the end."
        problems.append(UsageError(what, hint=f"--hours {_MIN_HOURS:g}"))
    if options.array and options.to != "slurm":
        problems.append(UsageError("--array is for Slurm.", hint="one submit for each training"))
    if options.array and not _ARRAY.fullmatch(options.array):
        problems.append(UsageError(f"--array {options.array} can't be read.", hint="--array 1-4, or 1,3,7-9"))
    if options.follow and (options.to not in ("slurm", "k8s") or options.array):
        hint = "leave --follow out; squeue shows an array, and Ray follows by itself"
        problems.append(UsageError("--follow is for one job of Slurm or Kubernetes.", hint=hint))
    if options.device not in ("cuda", "cpu"):
        problems.append(UsageError(f"--device {options.device}.", hint="--device cuda | cpu"))
    if any("\n" in text for text in (options.job, options.run_dir or "", options.image)):
        problems.append(UsageError("a line break is in the job, the run folder or the image."))
    if options.layout is not None and is_auto(options.layout):
        hint = "paceline plan JOB, then its layout"
        problems.append(UsageError("--layout auto can't be handed in.", hint=hint))
    if options.budget is not None and options.price is None:
        problems.append(UsageError("--budget needs the price of a machine.", hint="--price 3.2"))
    elif options.budget is not None and options.price is not None and _cost(options, options.price) > options.budget:
        cost = _cost(options, options.price)
        hours = options.budget / _cost(replace(options, hours=1.0), options.price)
        problems.append(
            UsageError(
                f"the job may cost {cost:,.2f}, and the budget is {options.budget:,.2f}.",
                hint=f"--hours {math.floor(hours * 100) / 100:g}",
            )
        )
    return problems


def _nodes_problem(options: SubmitOptions) -> UsageError:
    """Return the error for a number of machines that can't be read."""
    text = options.nodes_text
    match = _NODES.fullmatch(count_part(text))
    numbers = sorted(max(1, int(count)) for count in match.groups() if count) if match else [2]
    hint = f"--nodes {':'.join(map(str, numbers)) if options.to == 'ray' else numbers[-1]}"
    what, cause = f"--nodes {text} must be a number of machines, 1 or more.", ""
    if _NODES.fullmatch(text) is None:
        cause = "the scheduler chooses the machines, so submit takes no host"
    elif len(numbers) > 1:
        what = f"--nodes {text} must be two numbers, the smaller one first."
    return UsageError(what, cause=cause, hint=hint)


def _check_training(options: SubmitOptions, settings: list[str]) -> None:
    """Check the training as its nodes will, but for what only they have: their GPUs.

    Raises:
        PacelineError: `paceline train` would refuse the command.
    """
    for num_nodes in options.node_counts:
        _check_on_nodes(num_nodes, options, settings)


def _check_on_nodes(num_nodes: int, options: SubmitOptions, settings: list[str]) -> None:
    place = NodePlace(num_nodes=num_nodes, head_host="node0", port=DEFAULT_PORT, node=0)
    is_alone = num_nodes == 1
    common = RunOptions(
        layout=options.layout,
        update=options.update,
        compress=options.compress,
        device="cpu",
        config=options.config,
        run_dir=options.run_dir,
        place=None if is_alone else place,
        ranks=options.num_ranks if is_alone else None,
        ranks_per_node=options.num_ranks,
    )
    make_task("train", options.job, common, _as_first_task(settings))


def _submission(options: SubmitOptions, settings: list[str]) -> Submission:
    own_run = options.run_dir or f"runs/{short_name(options.job)}/{time.strftime('%Y%m%d-%H%M%S')}"
    flags = {"layout": options.layout, "update": options.update, "compress": options.compress, "config": options.config}
    defaults = {"layout": None, "update": "sync", "compress": "none", "config": None}
    words = [word for name, value in flags.items() if value != defaults[name] for word in (f"--{name}", str(value))]
    words += ["--device", options.device]
    return Submission(
        job=options.job,
        words=(*words, *settings),
        run=f"{_POD_FOLDER}/{Path(own_run).name}" if options.to == "k8s" else own_run,
        folder=Path(own_run) / "submit",
        num_nodes=options.num_nodes,
        ranks_per_node=options.num_ranks,
        hours=options.hours,
        uses_gpus=options.device != "cpu",
        image=options.image,
        own_settings=frozenset(_requested_settings(options, settings)),
    )


def _requested_settings(options: SubmitOptions, settings: list[str]) -> Mapping[str, object]:
    """Return the settings of the command line and of the file, by their names."""
    return read_requested_settings(file=options.config, overrides=_as_first_task(settings)).values


def _as_first_task(settings: list[str]) -> list[str]:
    """Return the settings with the number of the first task of an array in its place."""
    return [word.replace(TASK, "1") for word in settings]


def _make_file(options: SubmitOptions, submission: Submission) -> tuple[SubmissionFile, list[str]]:
    """Return the file, and what the scheduler would refuse of it.

    Raises:
        UsageError: an option of the scheduler can't be read.
    """
    if options.to == "slurm":
        return slurm_script(submission, options=read_slurm_options(options.using), array=options.array), []
    if options.to == "sagemaker":
        file = sagemaker_file(submission, read_sagemaker_options(options.using))
        return file, check_sagemaker(json.loads(file.text))
    if options.to == "ray":
        file = ray_script(submission, read_ray_options(options.using), max_nodes=options.node_counts[-1])
        return file, check_ray_script(file.text)
    own = read_kubernetes_options(options.using)
    file = kubernetes_file(submission, own)
    return file, _check_yaml(file.text, crd=own.crd)


def _check_yaml(text: str, *, crd: str) -> list[str]:
    """Return what is wrong with the documents of a YAML text. Without PyYAML, nothing is checked.

    Raises:
        UsageError: the definition can't be read.
    """
    try:
        import yaml
    except ImportError:
        print_line("note: not checked, because PyYAML is not installed (pip install 'paceline[k8s]')", sys.stderr)
        return []
    documents = list(yaml.safe_load_all(text))
    problems = [problem for document in documents for problem in check_kubernetes(document)]
    if crd:
        document = documents[-1]
        version = document["apiVersion"].rpartition("/")[2]
        problems += check_against_schema(document, read_crd_schema(Path(crd), document["kind"], version=version))
    return problems


def _cost(options: SubmitOptions, price: float) -> float:
    """Return the largest possible cost of one start of all tasks."""
    return options.node_counts[-1] * options.hours * price * _num_tasks(options.array)


def _num_tasks(array: str) -> int:
    """Return how many tasks an array has, such as 4 for "1-4"; 1 without an array."""
    if not _ARRAY.fullmatch(array):
        return 1
    parts = [part.partition("-") for part in array.partition("%")[0].split(",")]
    return sum(int(last or first) - int(first) + 1 for first, _, last in parts)


def _cost_lines(options: SubmitOptions) -> list[str]:
    if options.price is None:
        return []
    cost, num_tasks = _cost(options, options.price), _num_tasks(options.array)
    tasks = f"{num_tasks} times " if num_tasks > 1 else ""
    machines = plural(options.node_counts[-1], "machine")
    return [f"at most {cost:,.2f} for each start: {tasks}{machines} for {options.hours:g} h at {options.price:g} each"]


def _size_lines(options: SubmitOptions) -> list[str]:
    """Return a note about the sizes that were not typed, if they leave GPUs or machines unused."""
    lacks_nodes = options.nodes is None
    lacks_ranks = options.ranks_per_node is None and options.device != "cpu"
    if lacks_nodes and lacks_ranks:
        return ["note: one GPU of one node is used; --nodes 2 --ranks-per-node 8 for two nodes with eight each"]
    if lacks_ranks:
        whose = "each node" if options.node_counts[-1] > 1 else "the node"
        return [f"note: one GPU of {whose} is used; --ranks-per-node 8 for eight"]
    return ["note: 1 node; --nodes 2 for two"] if lacks_nodes else []


def _report(line: str) -> None:
    print_line(line)
