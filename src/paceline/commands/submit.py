"""The `submit` verb: writes and checks the file that hands a training in to Slurm, Kubernetes, Ray or SageMaker."""

import json
import math
import re
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain
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
from paceline.errors import LayoutError, PacelineError, UsageError, list_problems, raise_all
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
from paceline.submit.slurm_script import TASK, array_tasks, slurm_script
from paceline.submit.submission import IMAGE_EXAMPLE, Submission, SubmissionFile, write_submission
from paceline.submit.target_options import (
    read_kubernetes_options,
    read_ray_options,
    read_sagemaker_options,
    read_slurm_options,
)

_TARGETS = ("slurm", "k8s", "ray", "sagemaker")
_NODES = re.compile(r"(\d{1,9})(?::(\d{1,9}))?")
_LAYOUT_OPTION = re.compile(r"--layout (\S*[^\s,])")
_MIN_HOURS, _MAX_HOURS = 0.1, 8760
_MAX_MONEY = 1e12
_MAX_COUNTS = 1000
_MAX_SUGGESTED = 17  # numbers of nodes, or of processes on each, that are tried for a hint
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
    dry_run: bool = False
    """Write and check the file, and hand nothing in, as without `--follow`."""
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
        "run": file.run or submission.run,
    }
    lines = [f"wrote {file.path}", *_run_lines(options, submission, file), *_size_lines(options), *_cost_lines(options)]
    if options.follow and not options.dry_run:
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
    problems += _size_problems(options)
    if options.to == "ray" and options.image:
        hint = "the image is that of the cluster; leave --image out"
        problems.append(UsageError("--image is not for Ray.", hint=hint))
    if options.to in ("k8s", "sagemaker") and not options.image:
        hint = "--image REGISTRY/NAME:TAG; docs/containers.md builds one"
        problems.append(UsageError(f"--to {options.to} needs a container image.", hint=hint))
    if options.to == "slurm" and any(map(str.isspace, options.image)) and not options.image.startswith((".", "/")):
        hint = f"--image {IMAGE_EXAMPLE}, or the path of a file: /images/train.sqsh"
        problems.append(UsageError(f"--image {options.image!r} is no image and no path.", hint=hint))
    if options.array and options.to != "slurm":
        problems.append(UsageError("--array is for Slurm.", hint="one submit for each training"))
    if options.array and not array_tasks(options.array):
        problems.append(UsageError(f"--array {options.array} can't be read.", hint="--array 1-4, or 1,3,7-9"))
    if options.follow and (options.to not in ("slurm", "k8s") or options.array):
        hint = "leave --follow out; squeue shows an array, and Ray follows by itself"
        problems.append(UsageError("--follow is for one job of Slurm or Kubernetes.", hint=hint))
    if options.device not in ("cuda", "cpu"):
        problems.append(UsageError(f"--device {options.device}.", hint="--device cuda | cpu"))
    if any(
        len(f"{text}.".splitlines()) > 1
        for text in (options.job, options.run_dir or "", options.image, str(Path.cwd()))
    ):
        problems.append(UsageError("a line break is in the job, the run folder, the image or the working folder."))
    if options.layout is not None and is_auto(options.layout):
        hint = "paceline plan JOB, then its layout"
        problems.append(UsageError("--layout auto can't be handed in.", hint=hint))
    return [*problems, *_cost_problems(options)]


def _size_problems(options: SubmitOptions) -> list[PacelineError]:
    """Return errors for a number of machines or processes, and for a time limit, that are not possible."""
    problems: list[PacelineError] = []
    if options.num_nodes <= 0:
        problems.append(_nodes_problem(options))
    if options.num_ranks <= 0:
        problems.append(
            UsageError(f"--ranks-per-node {options.num_ranks} must be positive.", hint="--ranks-per-node 1")
        )
    if not 0 < options.hours <= _MAX_HOURS:
        what = f"--hours {options.hours:g} must be above 0, and at most a year, {_MAX_HOURS}."
        problems.append(UsageError(what, hint="--hours 24"))
    elif options.to == "slurm" and options.hours < _MIN_HOURS:
        what = f"--hours {options.hours:g} is too short: Slurm signals the ranks three minutes before the end."
        problems.append(UsageError(what, hint=f"--hours {_MIN_HOURS:g}"))
    if len(options.node_counts) > 1 and options.to != "ray":
        hint = f"--nodes {options.node_counts[-1]}, or --to ray"
        what = f"--nodes {options.nodes}: only Ray changes the number of machines."
        problems.append(UsageError(what, hint=hint))
    elif len(options.node_counts) > _MAX_COUNTS:
        what = f"--nodes {options.nodes}: the layout is checked on at most {_MAX_COUNTS} numbers of machines."
        problems.append(UsageError(what, hint=f"--nodes {options.num_nodes}:{options.num_nodes + _MAX_COUNTS - 1}"))
    return problems


def _cost_problems(options: SubmitOptions) -> list[PacelineError]:
    """Return errors for a price and a budget that are not above 0, and for a job that may cost more than its budget."""
    problems: list[PacelineError] = [
        UsageError(f"--{name} {value:g} must be above 0, and at most {_MAX_MONEY:g}.", hint=f"--{name} {example}")
        for name, value, example in (("price", options.price, 3.2), ("budget", options.budget, 100))
        if value is not None and not 0 < value <= _MAX_MONEY
    ]
    if options.budget is not None and options.price is None:
        problems.append(UsageError("--budget needs the price of a machine.", hint="--price 3.2"))
    if problems or options.budget is None or options.price is None or _size_problems(options):
        return problems
    cost = _cost(options, options.price)
    if cost > options.budget:
        hours = math.floor(options.budget / _cost(replace(options, hours=1.0), options.price) * 100) / 100
        is_enough = hours >= (_MIN_HOURS if options.to == "slurm" else 0.01)
        problems.append(
            UsageError(
                f"the job may cost {cost:,.2f}, and the budget is {options.budget:,.2f}.",
                hint=f"--hours {hours:g}" if is_enough else f"--budget {math.ceil(cost * 100) / 100:.2f}",
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
    raise_all(_task_problems(options, settings))
    for num_nodes in _counts_to_check(options):
        try:
            _check_on_nodes(num_nodes, options, settings)
        except PacelineError as error:
            problems = list_problems(error)
            for problem in problems if len(options.node_counts) > 1 else ():
                if isinstance(problem, LayoutError):
                    problem.where = f"{plural(num_nodes, 'node')}, of --nodes {options.nodes}"
                    problem.hint = _hint_for_all_counts(problem.hint, options, settings)
            raise_all(problems)


def _task_problems(options: SubmitOptions, settings: list[str]) -> list[PacelineError]:
    """Return an error for a `{task}` in whose place no number would come."""
    words = [options.run_dir or "", *settings]
    found = next((word for word in words if TASK in word), "")
    if found and not options.array:
        hint = "--array 1-4" if options.to == "slurm" else "one submit for each training; only Slurm has arrays"
        return [UsageError(f"{found} needs --array, which says which numbers the tasks have.", hint=hint)]
    from_file = read_requested_settings(file=options.config, overrides=[]).values
    return [
        UsageError(
            f"{name} = {value!r}: {TASK} is the number of a task only on the command line.", hint=f"--{name} {value}"
        )
        for name, value in from_file.items()
        if isinstance(value, str) and TASK in value
    ]


def _hint_for_all_counts(hint: str, options: SubmitOptions, settings: list[str]) -> str:
    """Return what to type so that the layout fits each of several numbers of nodes. Each suggestion was checked."""
    counts = options.node_counts[:_MAX_SUGGESTED]
    fitting = [count for count in counts if _is_possible(replace(options, nodes=str(count)), settings)]
    last = next((count for count in fitting if count + 1 not in fitting), 0)
    suggested = [f"--nodes {fitting[0]}:{last}" if last > fitting[0] else f"--nodes {last}"] if fitting else []
    ranks = range(options.num_ranks + 1, _MAX_SUGGESTED)
    more = next((count for count in ranks if _is_possible(replace(options, ranks_per_node=count), settings)), 0)
    suggested += [f"--ranks-per-node {more}"] if more else []
    for layout in (*_LAYOUT_OPTION.findall(hint), "ddp"):
        if not suggested and _is_possible(replace(options, layout=layout), settings):
            suggested.append(f"--layout {layout}")
    return ", or ".join(suggested) or "a layout that fits every number of nodes, such as --layout fsdp"


def _is_possible(options: SubmitOptions, settings: list[str]) -> bool:
    """Return whether the training can start on each possible number of nodes."""
    try:
        for num_nodes in _counts_to_check(options):
            _check_on_nodes(num_nodes, options, settings)
    except PacelineError:
        return False
    return True


def _counts_to_check(options: SubmitOptions) -> Iterable[int]:
    """Return the possible numbers of nodes, the largest first, because it may be too large for any layout."""
    counts = options.node_counts
    return chain(counts[-1:], counts[:-1])


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
        is_submitted=True,
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
    return options.node_counts[-1] * options.hours * price * _num_tasks(options)


def _num_tasks(options: SubmitOptions) -> int:
    """Return how often the training starts: once, or once for each task of an array."""
    return max(1, len(array_tasks(options.array)))


def _cost_lines(options: SubmitOptions) -> list[str]:
    if options.price is None:
        return []
    cost, num_tasks = _cost(options, options.price), _num_tasks(options)
    tasks = f"{num_tasks} times " if num_tasks > 1 else ""
    machines = plural(options.node_counts[-1], "machine")
    return [f"at most {cost:,.2f} for each start: {tasks}{machines} for {options.hours:g} h at {options.price:g} each"]


def _run_lines(options: SubmitOptions, submission: Submission, file: SubmissionFile) -> list[str]:
    """Return where the run folder is on the machines, if it is another path there, and where it is stored."""
    stored = f", which is {file.storage}" if file.storage else ""
    is_elsewhere = bool(file.run) or options.to == "k8s"
    return [f"run folder on the machines: {file.run or submission.run}{stored}"] if is_elsewhere else []


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
