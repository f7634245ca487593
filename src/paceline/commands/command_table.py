"""The table of verbs: the options of each, and the name of the function that runs it, imported when it runs."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

Printed = tuple[int, Any, str]
_Job = Annotated[str, tyro.conf.Positional]
_Run = Annotated[str | None, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One row: options, the function that runs the verb, and whether settings may follow.

    `run` names a function of the options and the settings that returns what to print. `options` is a class, or names
    one in the verb's own module.
    """

    options: type | str
    run: str
    takes_settings: bool = False


@dataclass(frozen=True, kw_only=True)
class Starting:
    """Options of verbs that start processes."""

    job: _Job
    ranks: int | None = None
    """Processes on this machine; default: all GPUs, else 1."""
    layout: str | None = None
    """single, threads, ddp, zero1, zero2, fsdp, hsdp, pp, tp, cp, ep, axes: pp=2,dp_shard=2, or auto; default: ddp."""
    update: str = "sync"
    """sync; a pipeline: pipedream, or 2bw; ddp: hogwild, or ps; sites: local,every=8, or diloco,every=500."""
    compress: str = "none"
    """How ddp sends gradients: none, bf16, fp16, int8,block=256, powersgd,rank=4, topk,ratio=0.01."""
    device: str = "auto"
    """auto, cpu or cuda."""
    config: Path | None = None
    """A TOML file of settings."""
    run_dir: str | None = None
    """The run folder; one that holds a checkpoint is gone on with."""
    faults: str = ""
    """Break the run on purpose: "kill rank=1 step=50"."""
    dry_run: bool = False
    """Check what can be checked, start nothing."""
    json: bool = False
    """The answer for a script."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Starting):
    """Train a job. Settings may follow: --train.steps 100; `paceline config JOB` prints all of them."""

    resume: str | None = None
    """Go on with this run or checkpoint; `newest`, or `--resume` alone: with the job's newest run."""
    allow: str = ""
    """Differences to accept on resume, by name: model,data,seed,..."""
    evaluate_first: bool = False
    """Evaluate before the first step."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Starting):
    """Check a layout, an update rule or compressed gradients against one process."""

    steps: int = 3
    """How many steps are compared."""
    against: str = "single"
    """What it is held against: one process, written naively."""


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Write an example job."""

    name: _Job
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Exact metrics of a checkpoint."""

    run: _Run = None
    split: str = "eval"
    best: bool = False
    ranks: int | None = None
    layout: str | None = None
    """How the model is placed; not given: as in the run."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Every setting."""

    job: _Job
    config: Path | None = None
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write the page."""

    run: _Run = None
    page: Path | None = None
    """Where the page goes; default: report.html in the run's folder."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Runs side by side, or layouts of one job."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """RUN RUN, or JOB with --layouts."""
    layouts: tuple[str, ...] = ()
    """Run the job in each: --layouts single ddp."""
    ranks: int | None = None
    steps: int = 8
    """Steps of each layout."""
    device: str = "auto"
    config: Path | None = None
    run_dir: str | None = None
    """A folder for the runs of the layouts."""
    dry_run: bool = False
    page: Path = Path("compare.html")
    """Where the page with the pictures goes."""
    json: bool = False


@dataclass(frozen=True, kw_only=True)
class CkptOptions:
    """List, verify, compare, consolidate or prune checkpoints."""

    what: _Job
    """ls, verify, diff, consolidate or prune."""
    run: _Run = None
    """A run, or a checkpoint in it; default: the newest run."""
    other: _Run = None
    """diff: the run or checkpoint to compare with."""
    keep: int = 3
    """prune: how many of the last to keep; the best and the only good one always stay."""
    to: Path = Path("consolidated")
    """consolidate: the folder to write, which must not exist."""
    best: bool = False
    """consolidate: the checkpoint marked best, not the newest good one."""
    raw: bool = False
    """consolidate: the weights in training, also where the job has an average (ema=), which is what was evaluated."""
    average: bool = False
    """consolidate: the average, or a refusal where there is none."""
    json: bool = False


VERBS: dict[str, Verb] = {
    "new": Verb(options=NewOptions, run="paceline.commands.new:answer"),
    "train": Verb(options=TrainOptions, run="paceline.commands.train:answer", takes_settings=True),
    "verify": Verb(options=VerifyOptions, run="paceline.commands.verify:answer", takes_settings=True),
    "plan": Verb(
        options="paceline.commands.plan:PlanOptions", run="paceline.commands.plan:answer", takes_settings=True
    ),
    "simulate": Verb(
        options="paceline.commands.simulate:SimulateOptions",
        run="paceline.commands.simulate:answer",
        takes_settings=True,
    ),
    "evaluate": Verb(options=EvaluateOptions, run="paceline.commands.evaluate:answer"),
    "compare": Verb(options=CompareOptions, run="paceline.commands.compare:answer", takes_settings=True),
    "report": Verb(options=ReportOptions, run="paceline.commands.report:answer"),
    "ckpt": Verb(options=CkptOptions, run="paceline.commands.ckpt:answer"),
    "config": Verb(options=ConfigOptions, run="paceline.commands.config:answer", takes_settings=True),
}
