"""The table of verbs: the options of each, and the function that runs it, which is imported when the verb runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from paceline.plugins import resolve

VerbOutput = tuple[int, Any, str]
_Positional = Annotated[str, tyro.conf.Positional]
_OptionalPositional = Annotated[str | None, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A row of the table: the options, the function that runs the verb, and whether the verb takes settings.

    `run` names a function that takes the options and the settings and returns a `VerbOutput`: exit code, `--json` value
    and text. With `takes_command`, it gets the command of another program, which follows `--`, in place of settings.
    `options` is a class, or the name of one in the verb's module.
    """

    options: type | str
    run: str
    takes_settings: bool = False
    takes_command: bool = False

    def option_class(self) -> type:
        """Return the class of the options, which is imported if `options` is its name."""
        return resolve(self.options) if isinstance(self.options, str) else self.options


@dataclass(frozen=True, kw_only=True)
class StartOptions:
    """The options shared by the verbs that start processes."""

    job: _Positional
    """job.py, job.py:NAME or pkg.module:NAME."""
    ranks: int | None = None
    """Number of processes on this machine; default: the ranks that the sizes in `--layout` need, plus the
    servers of `--update`; without sizes: one per GPU, or 1. `train --ranks 2:4` continues with fewer than 4
    ranks, at least 2, if one is lost."""
    layout: str | None = None
    """single, threads, ddp, zero1, zero2, fsdp, hsdp, pp, tp, cp or ep; several axes: pp=2,dp_shard=2; or auto;
    default: single for one process, otherwise ddp, or pp if `--update` needs it."""
    update: str = "sync"
    """The update rule: sync; with pp: pipedream or 2bw; with ddp: hogwild (train only) or ps; with replicas as sites:
    local,every=8 or diloco,every=500."""
    compress: str = "none"
    """How ddp sends gradients: none, bf16, fp16, int8,block=256, powersgd,rank=4 or topk,ratio=0.01."""
    device: str = "auto"
    """auto, cpu or cuda."""
    config: Path | None = None
    """A TOML file of settings."""
    run_dir: str | None = None
    """The run folder. If it holds a checkpoint, the run is resumed."""
    faults: str = ""
    """Faults to inject, to test a run: "kill rank=1 step=50"."""
    dry_run: bool = False
    """Check what can be checked without importing the job, and start nothing."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(StartOptions):
    """Train a job, or resume a run."""

    resume: str | None = None
    """Resume this run or checkpoint; `--resume` alone (or `newest`) resumes the job's newest run."""
    allow: str = ""
    """Names of the differences to accept when the run is resumed: model,data,seed,..."""
    evaluate_first: bool = False
    """Evaluate before the first step."""
    nodes: str | None = None
    """N:HOST or N:HOST:PORT: train on N machines, of which HOST is the first. Type the same line on each of them. N
    alone plays N machines on this one. MIN:N in place of N: they may come and go while the run lasts.
    Slurm, Kubeflow and SageMaker say it by themselves if you give `--ranks-per-node`."""
    node: int | None = None
    """The number of this machine; default: from the scheduler, else in the order of arrival. HOST is 0."""
    ranks_per_node: int | None = None
    """Number of processes on each machine; default: one per GPU, or 1."""
    verbose: Annotated[bool, tyro.conf.arg(aliases=["-v"])] = False
    """Print the whole start banner, not only its most important lines."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(StartOptions):
    """Check a layout, an update rule or compressed gradients against one process."""

    run_dir: str | None = None
    """The folder for the result and the logs."""
    steps: int = 3
    """Number of steps to compare."""
    against: str = "single"
    """The reference: single, a naive training loop in one process."""


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Write an example job."""

    name: _Positional
    """The example: text, digits or hf."""
    json: bool = False
    """Print the file's path as JSON."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Print the exact metrics of a checkpoint."""

    run: _OptionalPositional = None
    """A run folder, or a checkpoint in it; default: the newest run."""
    split: str = "eval"
    """The data to evaluate on: eval or test."""
    best: bool = False
    """Evaluate the checkpoint that is marked best."""
    ranks: int | None = None
    """Number of processes; default: the ranks that the sizes in `--layout` need; without sizes: as in the run."""
    layout: str | None = None
    """The layout of the model; default: the run's layout. It is single or ddp instead if the number of processes
    differs, if the run's layout is threads or auto, or if the run's update rule is not sync."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Print every setting of a job, its value, and where the value comes from."""

    job: _Positional
    """job.py, job.py:NAME or pkg.module:NAME."""
    config: Path | None = None
    """A TOML file of settings."""
    json: bool = False
    """Print the settings as JSON."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write a run's page: curves, timings, settings and failures."""

    run: _OptionalPositional = None
    """A run folder; default: the newest run."""
    page: Path | None = None
    """The file to write; default: report.html in the run folder."""
    json: bool = False
    """Print the page's path as JSON."""


@dataclass(frozen=True, kw_only=True)
class WhyOptions:
    """Explain why a run hangs, failed or ended: the rank, the line of your code, and what to do."""

    run: _OptionalPositional = None
    """A run folder; default: the newest run."""
    live: bool = False
    """Repeat every second until the run ends."""
    json: bool = False
    """Print the explanation as JSON."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check this machine, or all nodes of a run and the links between them, before a training."""

    job: _OptionalPositional = None
    """A job, as job.py: its code is compared between the nodes."""
    nodes: str | None = None
    """N:HOST or N:HOST:PORT: the number of nodes, and the host of node 0. Type the same line on every node. Under
    `srun --ntasks-per-node=1`, the step says it."""
    node: int | None = None
    """The number of this node; default: from Slurm, Kubeflow or Kubernetes, else in the order of arrival."""
    run_dir: str = "runs"
    """The folder of the runs, which all nodes should share."""
    data: tuple[str, ...] = ()
    """Folders or files of data; their names and sizes are compared."""
    wait: float = 30.0
    """Seconds to wait for the other nodes."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Compare runs side by side, or layouts of one job."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Two runs or recordings; with --layouts: one job, as job.py."""
    layouts: tuple[str, ...] = ()
    """Train the job for a few steps in each of these layouts: --layouts single ddp."""
    ranks: int | None = None
    """With --layouts: number of processes on this machine."""
    steps: int = 8
    """With --layouts: number of steps of each layout."""
    device: str = "auto"
    """With --layouts: auto, cpu or cuda."""
    config: Path | None = None
    """With --layouts: a TOML file of settings."""
    run_dir: str | None = None
    """With --layouts: the folder for the runs."""
    dry_run: bool = False
    """Check what can be checked without importing the job, and start nothing."""
    page: Path = Path("compare.html")
    """The page to write, with curves and pictures."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class CkptOptions:
    """List, verify, compare, consolidate or prune checkpoints."""

    what: _Positional
    """What to do: ls, verify, diff, consolidate or prune."""
    run: _OptionalPositional = None
    """A run, or a checkpoint in it; default: the newest run."""
    other: _OptionalPositional = None
    """diff: the run or checkpoint to compare with."""
    keep: int = 3
    """prune: number of newest checkpoints to keep; the best checkpoint, and the only good one, are never removed."""
    to: Path = Path("consolidated")
    """consolidate: the folder to write, which must not exist."""
    best: bool = False
    """consolidate: the checkpoint marked best, not the newest good one."""
    raw: bool = False
    """consolidate: the training weights, even if the job evaluates an average (ema=)."""
    average: bool = False
    """consolidate: the average; fail if there is none."""
    json: bool = False
    """Print the result as JSON."""


VERBS: dict[str, Verb] = {
    "new": Verb(options=NewOptions, run="paceline.commands.new:run_verb"),
    "train": Verb(options=TrainOptions, run="paceline.commands.train:run_verb", takes_settings=True),
    "verify": Verb(options=VerifyOptions, run="paceline.commands.verify:run_verb", takes_settings=True),
    "plan": Verb(
        options="paceline.commands.plan:PlanOptions", run="paceline.commands.plan:run_verb", takes_settings=True
    ),
    "simulate": Verb(
        options="paceline.commands.simulate:SimulateOptions",
        run="paceline.commands.simulate:run_verb",
        takes_settings=True,
    ),
    "evaluate": Verb(options=EvaluateOptions, run="paceline.commands.evaluate:run_verb"),
    "submit": Verb(
        options="paceline.commands.submit:SubmitOptions", run="paceline.commands.submit:run_verb", takes_settings=True
    ),
    "compare": Verb(
        options=CompareOptions, run="paceline.script_check.comparison.compare_verb:run_verb", takes_settings=True
    ),
    "report": Verb(options=ReportOptions, run="paceline.commands.report:run_verb"),
    "why": Verb(options=WhyOptions, run="paceline.commands.why:run_verb"),
    "check": Verb(
        options="paceline.script_check.check_command:CheckOptions",
        run="paceline.script_check.check_command:run_verb",
        takes_command=True,
    ),
    "record": Verb(
        options="paceline.script_check.record_command:RecordOptions",
        run="paceline.script_check.record_command:run_verb",
        takes_command=True,
    ),
    "verify-script": Verb(
        options="paceline.script_check.verify_script_command:VerifyScriptOptions",
        run="paceline.script_check.verify_script_command:run_verb",
    ),
    "doctor": Verb(options=DoctorOptions, run="paceline.commands.doctor:run_verb"),
    "ckpt": Verb(options=CkptOptions, run="paceline.commands.ckpt:run_verb"),
    "config": Verb(options=ConfigOptions, run="paceline.commands.config:run_verb", takes_settings=True),
}
