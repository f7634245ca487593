"""The table of verbs: each verb's options, its call, and what it prints."""

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from paceline.commands import ckpt as ckpt_verbs
from paceline.commands import config as config_verb
from paceline.commands import new as new_verb
from paceline.commands import plan as plan_verb
from paceline.commands import simulate as simulate_verb
from paceline.commands import train as train_verb
from paceline.commands.common.execution import CommandResult, RunOptions, failure_result
from paceline.commands.compare_layouts import compare_layouts, refuse_mixed
from paceline.commands.evaluate import evaluate
from paceline.commands.report import report
from paceline.commands.verify import verify
from paceline.console.formatting import plural
from paceline.errors import UsageError
from paceline.reporting.sinks.console_lines import VERBOSE

Printed = tuple[int, Any, str]
_Job = Annotated[str, tyro.conf.Positional]
_Run = Annotated[str | None, tyro.conf.Positional]


@dataclass(frozen=True, kw_only=True)
class Verb:
    """One row of the table: the options, whether settings may follow, and the call."""

    options: type
    run: Callable[[Any, list[str]], Printed]
    takes_settings: bool = False


@dataclass(frozen=True, kw_only=True)
class Starting:
    """The options shared by the verbs that start processes."""

    job: _Job
    ranks: int | None = None
    """Number of processes on this machine; default: one per GPU, or 1."""
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
    """The run folder. If it holds a checkpoint, the run is resumed."""
    faults: str = ""
    """Break the run on purpose: "kill rank=1 step=50"."""
    dry_run: bool = False
    """Check everything that can be checked, and start nothing."""
    json: bool = False
    """Print the result as JSON."""

    def common(self) -> RunOptions:
        """Return these options in the form that the verbs take."""
        return RunOptions(
            ranks=self.ranks,
            layout=self.layout,
            update=self.update,
            compress=self.compress,
            device=self.device,
            config=self.config,
            run_dir=self.run_dir,
            faults=self.faults,
            dry_run=self.dry_run,
            quiet=self.json,
        )


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Starting):
    """Train a job, or resume a run."""

    resume: str | None = None
    """Resume this run or checkpoint; `--resume` alone (or `newest`) resumes the job's newest run."""
    allow: str = ""
    """Differences to accept on resume, by name: model,data,seed,..."""
    evaluate_first: bool = False
    """Evaluate before the first step."""
    verbose: Annotated[bool, tyro.conf.arg(aliases=["-v"])] = False
    """Print the whole start banner, not only its most important lines."""


@dataclass(frozen=True, kw_only=True)
class VerifyOptions(Starting):
    """Check a layout, an update rule or compressed gradients against one process."""

    steps: int = 3
    """Number of steps to compare."""
    against: str = "single"
    """The reference: one process, written naively."""


@dataclass(frozen=True, kw_only=True)
class NewOptions:
    """Write an example job."""

    name: _Job
    """text, digits or hf."""
    json: bool = False
    """Print the file's path as JSON."""


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Print the exact metrics of a checkpoint."""

    run: _Run = None
    """A run folder, or a checkpoint in it; default: the newest run."""
    split: str = "eval"
    """The data to evaluate on: eval or test."""
    best: bool = False
    """Evaluate the checkpoint that is marked best."""
    ranks: int | None = None
    """Number of processes; default: as in the run."""
    layout: str | None = None
    """The layout of the model; default: that of the run."""
    json: bool = False
    """Print the result as JSON."""


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Print every setting of a job, its value, and where the value comes from."""

    job: _Job
    config: Path | None = None
    """A TOML file of settings."""
    json: bool = False
    """Print the settings as JSON."""


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Write a run's page: curves, timings, settings and failures."""

    run: _Run = None
    """A run folder; default: the newest run."""
    page: Path | None = None
    """The file to write; default: report.html in the run folder."""
    json: bool = False
    """Print the page's path as JSON."""


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Compare runs side by side, or layouts of one job."""

    runs: Annotated[tuple[str, ...], tyro.conf.Positional]
    """RUN RUN, or JOB with --layouts."""
    layouts: tuple[str, ...] = ()
    """Run the job in each: --layouts single ddp."""
    ranks: int | None = None
    """With --layouts: number of processes on this machine."""
    steps: int = 8
    """With --layouts: number of steps of each layout."""
    device: str = "auto"
    """With --layouts: auto, cpu or cuda."""
    config: Path | None = None
    """With --layouts: a TOML file of settings."""
    run_dir: str | None = None
    """With --layouts: a folder for the runs."""
    dry_run: bool = False
    """Check everything that can be checked, and start nothing."""
    page: Path = Path("compare.html")
    """The page to write, with curves and pictures."""
    json: bool = False
    """Print the result as JSON."""


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
    """prune: number of newest checkpoints to keep; the best and the only good one always stay."""
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


def _new(options: NewOptions, _: list[str]) -> Printed:
    path = new_verb.new(options.name)
    text = f"wrote {path}\nnext:\n  paceline train {path} --ranks 2\n  paceline verify {path} --layout ddp --ranks 2"
    return 0, {"path": str(path)}, text


def _train(options: TrainOptions, settings: list[str]) -> Printed:
    allow = [name for name in options.allow.split(",") if name]
    if options.verbose:
        os.environ[VERBOSE] = "1"
    if options.resume is not None and not options.resume.strip():
        raise UsageError("--resume is empty: is a variable unset?", hint="--resume alone resumes the newest run")
    resume = "" if options.resume == "newest" else options.resume
    answer = train_verb.train(
        options.job,
        common=options.common(),
        overrides=settings,
        resume=resume,
        allow=allow,
        evaluate_first=options.evaluate_first,
    )
    if options.dry_run:
        return 0, answer.value, "\n".join(f"{k}: {v}" for k, v in (answer.value or {}).items())
    answer = failure_result(answer)
    if not answer.tells:
        return answer.exit_code, None, ""
    value = {**_summary(answer), **(train_verb.came_to(answer) if options.json else {})}
    return answer.exit_code, value, answer.screen or (f"run: {answer.run}" if answer.run.name else "")


def _verify(options: VerifyOptions, settings: list[str]) -> Printed:
    answer = verify(
        options.job, common=options.common(), overrides=settings, steps=options.steps, against=options.against
    )
    answer = failure_result(answer)
    if not answer.tells:
        return answer.exit_code, None, ""
    return answer.exit_code, _summary(answer) if answer.value is None else answer.value, answer.screen


def _plan(options: plan_verb.PlanOptions, settings: list[str]) -> Printed:
    answer = failure_result(plan_verb.plan_from_options(options, settings))
    return answer.exit_code, _summary(answer) if answer.value is None else answer.value, answer.screen


def _simulate(options: simulate_verb.SimulateOptions, settings: list[str]) -> Printed:
    found = simulate_verb.simulate_from_options(options, settings)
    return found.exit_code, found.value, found.text


def _evaluate(options: EvaluateOptions, _: list[str]) -> Printed:
    common = RunOptions(ranks=options.ranks, layout=options.layout, quiet=options.json)
    answer = failure_result(evaluate(options.run, split=options.split, best=options.best, common=common))
    if not answer.tells:
        return answer.exit_code, None, ""
    if answer.exit_code:
        return answer.exit_code, _summary(answer), answer.screen
    value = answer.value
    lines = [f"{name} {number:.6f}" for name, number in value["metrics"].items()]
    of = ", averaged weights (ema)" if value["average"] else ""
    lines.append(f"{plural(value['samples'], 'sample')} of {value['split']}_data, each once; step {value['step']}{of}")
    return 0, value, "\n".join(lines)


def _config(options: ConfigOptions, settings: list[str]) -> Printed:
    rows = config_verb.config(options.job, file=options.config, overrides=settings)
    width = max(len(row.name) for row in rows)
    return 0, rows, "\n".join(f"{row.name:<{width}}  {row.value!s:<24} {row.origin}" for row in rows)


def _report(options: ReportOptions, _: list[str]) -> Printed:
    path = report(options.run, page=options.page)
    return 0, {"report": str(path)}, str(path)


def _compare(options: CompareOptions, settings: list[str]) -> Printed:
    if options.layouts:
        return _compare_layouts(options, settings)
    refuse_mixed(options.runs, settings)
    from paceline.commands.compare import compare  # brings numpy, which no other verb waits for

    found = compare(*options.runs, page=options.page)
    return found.exit_code, asdict(found), found.text


def _compare_layouts(options: CompareOptions, settings: list[str]) -> Printed:
    if len(options.runs) != 1:
        raise UsageError(f"--layouts takes one job, got {len(options.runs)}.", hint="compare JOB --layouts A B")
    common = RunOptions(
        ranks=options.ranks,
        device=options.device,
        config=options.config,
        run_dir=options.run_dir,
        dry_run=options.dry_run,
        quiet=options.json,
    )
    found = compare_layouts(
        options.runs[0],
        layouts=options.layouts,
        common=common,
        overrides=settings,
        steps=options.steps,
        page=options.page,
    )
    return found.exit_code, asdict(found), found.text


def _summary(answer: CommandResult) -> Mapping[str, Any]:
    return {"exit_code": answer.exit_code, "run": str(answer.run), "seconds": answer.seconds, **answer.keys}


VERBS: dict[str, Verb] = {
    "new": Verb(options=NewOptions, run=_new),
    "train": Verb(options=TrainOptions, run=_train, takes_settings=True),
    "verify": Verb(options=VerifyOptions, run=_verify, takes_settings=True),
    "plan": Verb(options=plan_verb.PlanOptions, run=_plan, takes_settings=True),
    "simulate": Verb(options=simulate_verb.SimulateOptions, run=_simulate, takes_settings=True),
    "evaluate": Verb(options=EvaluateOptions, run=_evaluate),
    "compare": Verb(options=CompareOptions, run=_compare, takes_settings=True),
    "report": Verb(options=ReportOptions, run=_report),
    "ckpt": Verb(options=CkptOptions, run=ckpt_verbs.answer),
    "config": Verb(options=ConfigOptions, run=_config, takes_settings=True),
}
