"""The verbs as functions: `pl.train`, `pl.verify`, `pl.plan` and the others.

The options of a verb are keyword arguments of the same names. If the verb takes settings, the argument `settings` maps
the dotted name of each setting to its value. A job is a `Job` object, or the text that the command takes. The result
has the keys of the verb's `--json` as attributes. If a run fails, the function raises the error of the first failing
rank.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import paceline.errors as errors
from paceline.commands import evaluate as evaluate_verb
from paceline.commands import plan as plan_verb
from paceline.commands import simulate as simulate_verb
from paceline.commands import train as train_verb
from paceline.commands import verify as verify_verb
from paceline.commands.common.compare_layouts import LayoutComparison, compare_layouts
from paceline.commands.common.execution import CommandOutcome, RunOptions
from paceline.commands.common.python_result import Result
from paceline.config.job_reference import OBJECT_PREFIX
from paceline.config.merge_settings import JOB, RequestedSettings, as_command_text, flatten
from paceline.errors import ExitCode, PacelineError, RunError, UsageError
from paceline.launch.failures.uncaught_exceptions import install_uncaught_hook, remove_hook_at_end
from paceline.planner.simulation.failure_forecast import CheckpointCosts
from paceline.plugins import resolve

JobOrPath = Any  # a paceline.Job, or a str or Path; the type `Job` would import torch with every verb
Settings = Mapping[str, Any]


def train(
    job: JobOrPath,
    *,
    ranks: int | None = None,
    layout: str | None = None,
    update: str = "sync",
    compress: str = "none",
    device: str = "auto",
    config: str | Path | None = None,
    run_dir: str | Path | None = None,
    resume: str | Path | bool = False,
    allow: Sequence[str] = (),
    evaluate_first: bool = False,
    faults: str = "",
    settings: Settings | None = None,
    dry_run: bool = False,
) -> Result:
    """Train a job.

    Args:
        job: a `Job`, or `"job.py"`, `"job.py:name"`, `"package.module:name"`.
        ranks: number of processes on this machine; default: the ranks that the sizes in `layout` need, plus the servers
            of `update`; without sizes: one per GPU, or 1.
        layout: `ddp`, `fsdp`, `pp=2,tp=2`, `auto`, ...
        update: how a batch becomes an update: `sync`, `pipedream`, `ps`, `local,every=8`, ...
        compress: how `ddp` sends gradients: `none`, `bf16`, `powersgd,rank=4`, ...
        device: `auto`, `cpu` or `cuda`.
        config: a TOML file of settings.
        run_dir: the run folder; if it holds a checkpoint, the run is resumed.
        resume: True to resume the job's newest run, or the path of a run or checkpoint.
        allow: differences to accept on resume, by name.
        evaluate_first: evaluate before the first step.
        faults: faults to inject, such as `"kill rank=1 step=50"`.
        settings: values by dotted name, such as `{"train.steps": 100, "job.lr": 1e-3}`.
        dry_run: check what can be checked and start nothing.

    Returns:
        `exit_code` (0, or 75 if it was stopped and saved), `run`, `seconds`, `step`, `evaluation`, `digest`.

    Raises:
        PacelineError: the run was refused or failed; the error is that of the first failing rank. Under torchrun,
            mpirun or srun it is the error of this rank, of any type.
    """
    with _job_and_options(
        job, ranks=ranks, layout=layout, update=update, compress=compress, device=device, config=config,
        run_dir=run_dir, faults=faults, dry_run=dry_run,
    ) as (text, common):  # fmt: skip
        outcome = train_verb.train(
            text,
            common=common,
            overrides=_settings_arguments(settings),
            resume=_resume_argument(resume),
            allow=tuple(allow),
            evaluate_first=evaluate_first,
        )
        if outcome.value is None:
            outcome = replace(outcome, value=train_verb.read_training_result(outcome))
        return _build_result(outcome)


def verify(
    job: JobOrPath,
    *,
    ranks: int | None = None,
    layout: str | None = None,
    update: str = "sync",
    compress: str = "none",
    steps: int = 3,
    against: str = "single",
    device: str = "auto",
    config: str | Path | None = None,
    run_dir: str | Path | None = None,
    faults: str = "",
    settings: Settings | None = None,
    dry_run: bool = False,
) -> Result:
    """Check that a layout, an update rule or compressed gradients train as their single-process reference does.

    Args:
        steps: how many steps are compared.
        against: the reference. The only one is `single`, a naive training loop in one process.
        job, ranks, settings and the others: as in `train`.

    Returns:
        `verdict` (`bitwise`, `rounding`, `different` or `undecided`), `exit_code` (4 if it is different, 1 if it is
        undecided), `reference`, `layout`, `update`, `ranks`, `steps`, `max_difference`, `noise_floor`,
        `first_difference` (`step`, `parameter`, `cause`), `not_exercised` (what the verdict says nothing about).

    Raises:
        PacelineError: the comparison was refused or failed.
    """
    with _job_and_options(
        job, ranks=ranks, layout=layout, update=update, compress=compress, device=device, config=config,
        run_dir=run_dir, faults=faults, dry_run=dry_run,
    ) as (text, common):  # fmt: skip
        outcome = verify_verb.verify(
            text, common=common, overrides=_settings_arguments(settings), steps=steps, against=against
        )
        return _build_result(outcome, has_value=outcome.value is not None)


def plan(
    job: JobOrPath,
    *,
    cluster: str = "here",
    ranks: int | None = None,
    nodes: int | None = None,
    ranks_per_node: int | None = None,
    link: str | None = None,
    layout: str | None = None,
    layouts: Sequence[str] = (),
    against: str | Path | None = None,
    page: str | Path | None = None,
    seconds: float | None = None,
    device: str = "auto",
    config: str | Path | None = None,
    run_dir: str | Path | None = None,
    settings: Settings | None = None,
    dry_run: bool = False,
) -> Result:
    """Return which layouts of a job fit a cluster, their predicted memory and time, and why the others do not fit.

    Args:
        job: a `Job` or its file, or a Hugging Face config: a folder, or `"transformers:LlamaConfig"`.
        cluster: `here`, `8xH100-80G`, `4x8xA100-80G@ib-hdr`, or a TOML file.
        ranks: number of processes on this machine, if the cluster is `here`.
        nodes: number of machines like this one, instead of a cluster.
        ranks_per_node: number of processes on each of these machines.
        link: the link between these machines: `20Mbit/s`, `eth-10g`, or the file from `paceline doctor --json`.
        layout: judge this layout instead of searching.
        layouts: judge these layouts and compare them.
        against: another plan.json, or its folder, to compare with.
        page: an HTML file to write.
        seconds: time limit for timing layouts, if the cluster is `here`; 0: no timing.
        settings: values by dotted name, as in `train`.

    Returns:
        `case` (what fits on one device: 1 the training state and a microbatch, 2 each layer, 3 not even each layer),
        `recommended`, `plans` (each `layout`, `fits`, `peak_bytes`, `step_seconds`, and `why` it does not fit or what
        limits its speed), and `exit_code`: 2 if none of the named layouts is sure to fit.

    Raises:
        PacelineError: the plan was refused or failed.
    """
    with _job_and_options(
        job, ranks=ranks, layout=layout, device=device, config=config, run_dir=run_dir, dry_run=dry_run
    ) as (
        text,
        common,
    ):
        outcome = plan_verb.plan(
            text, cluster=cluster, nodes=nodes, ranks_per_node=ranks_per_node, link=link, layouts=layouts,
            against=against, page=page, seconds=seconds, common=common, overrides=_settings_arguments(settings),
        )  # fmt: skip
        return _build_result(outcome, has_value=outcome.value is not None)


def simulate(
    job: JobOrPath,
    *,
    cluster: str | None = None,
    layout: str | None = None,
    failures: str | None = None,
    every: int | None = None,
    checkpoint_seconds: float = CheckpointCosts.stall_seconds,
    write_seconds: float = CheckpointCosts.write_seconds,
    restart_seconds: float = CheckpointCosts.restart_seconds,
    page: str | Path | None = None,
    ranks: int | None = None,
    device: str = "auto",
    config: str | Path | None = None,
    run_dir: str | Path | None = None,
    settings: Settings | None = None,
) -> Result:
    """Simulate one step in virtual time, and estimate the goodput under failures.

    Args:
        job: as in `plan`, or a plan.json.
        failures: the mean time between two failures of one device, such as `"50000 h"`.
        every: steps between two checkpoints; the best number is reported too.
        checkpoint_seconds: how long training stops for a checkpoint.
        write_seconds: how long after that the checkpoint is safe on disk.
        restart_seconds: how long a failure stops training.

    Raises:
        PacelineError: the simulation was refused or failed.
    """
    with _job_and_options(job, ranks=ranks, device=device, config=config, run_dir=run_dir) as (text, common):
        simulation = simulate_verb.simulate(
            text,
            cluster=cluster,
            layout=layout,
            failures=failures,
            every=every,
            checkpoint_seconds=checkpoint_seconds,
            write_seconds=write_seconds,
            restart_seconds=restart_seconds,
            page=page,
            common=common,
            overrides=_settings_arguments(settings),
        )
    if simulation.exit_code:
        raise RunError(simulation.text)
    return Result({"exit_code": simulation.exit_code, **(simulation.value or {})}, text=simulation.text)


def evaluate(
    run: str | Path | None = None,
    *,
    split: str = "eval",
    best: bool = False,
    ranks: int | None = None,
    layout: str | None = None,
    job: JobOrPath | None = None,
) -> Result:
    """Return the exact metrics of a run's newest good checkpoint, of its best, or of a given checkpoint.

    Args:
        run: a run folder or a checkpoint in it; default: the newest run.
        split: `eval` or `test`.
        best: evaluate the checkpoint that is marked best.
        ranks: number of processes; default: the ranks that the sizes in `layout` need; without sizes: as in the run.
        layout: how the model is placed, such as `fsdp` or `pp=2,tp=2`; default: the run's layout. It is `single`
            or `ddp` instead if the number of processes differs, if the run's layout is `threads` or `auto`, or if the
            run's update rule is not `sync`.
        job: the `Job` of a run that was started with an object.

    Returns:
        `split`, `step`, `checkpoint`, `metrics`, `samples`, `average` (True if the weights are the average of `ema=`).

    Raises:
        PacelineError: there is no such run, split or checkpoint, or the evaluation failed.
    """
    run_path = None if run is None else str(run)
    if job is None or isinstance(job, str | Path):
        return _build_result(
            evaluate_verb.evaluate(run_path, split=split, best=best, common=RunOptions(ranks=ranks, layout=layout))
        )
    with _job_and_options(job, ranks=ranks, layout=layout) as (_, common):
        return _build_result(evaluate_verb.evaluate(run_path, split=split, best=best, common=common))


def compare(
    *what: JobOrPath,
    layouts: Sequence[str] = (),
    ranks: int | None = None,
    steps: int = 8,
    device: str = "auto",
    config: str | Path | None = None,
    run_dir: str | Path | None = None,
    settings: Settings | None = None,
    page: str | Path | None = None,
    dry_run: bool = False,
) -> Any:
    """Compare runs or recordings side by side; with `layouts`, one job in each of them.

    Args:
        what: two or more run folders or recordings; with `layouts`, one job.
        layouts: train the job in each of these for a few `steps`, on the same samples.
        page: an HTML file to write.

    Returns:
        For runs: `runs`, `settings`, `losses`, `recordings`, `first_difference`. For layouts: `layouts`. For both:
        `page`, `text` and `exit_code`.

    Raises:
        UsageError: fewer than two runs, a folder that is neither a run nor a recording, or wrong settings.
    """
    if not layouts:
        options = {"ranks": ranks, "settings": settings, "config": config, "run_dir": run_dir, "dry_run": dry_run}
        if unused := [name for name, value in options.items() if value]:
            raise UsageError(
                f"pl.compare got {', '.join(unused)} without layouts.",
                cause="comparing runs reads their folders and starts nothing",
                hint='pl.compare(job, layouts=["ddp", "fsdp"], ranks=2), or pl.compare(RUN, RUN)',
            )
        return resolve("paceline.commands.compare:compare")(*what, page=page)  # imports numpy
    if len(what) != 1:
        raise UsageError(
            f"pl.compare with layouts= takes one job, got {len(what)}.",
            hint='pl.compare("job.py", layouts=["ddp", "fsdp"])',
        )
    with _job_and_options(what[0], ranks=ranks, device=device, config=config, run_dir=run_dir, dry_run=dry_run) as (
        text,
        common,
    ):
        comparison: LayoutComparison = compare_layouts(
            text, layouts=layouts, common=common, overrides=_settings_arguments(settings), steps=steps, page=page
        )
    return comparison


@contextmanager
def _job_and_options(
    job: JobOrPath,
    *,
    run_dir: str | Path | None = None,
    config: str | Path | None = None,
    **options: Any,
) -> Iterator[tuple[str, RunOptions]]:
    """Yield the job's reference and the options of a verb; the file of a `Job` object stays open for the ranks."""
    hook = install_uncaught_hook()
    run_options: dict[str, Any] = {
        **options,
        "run_dir": None if run_dir is None else str(run_dir),
        "config": None if config is None else Path(config),
    }
    with remove_hook_at_end(hook):
        if isinstance(job, str | Path):
            yield str(job), RunOptions(**run_options)
        else:
            _refuse_other_types(job)
            with resolve("paceline.job_transfer:open_job_file")(job) as handle:
                name = job.name or _script_name()
                yield f"{OBJECT_PREFIX}:{name}", RunOptions(**run_options, job_handle=handle)


def _script_name() -> str:
    name = Path(sys.argv[0]).stem
    return "notebook" if name == "ipykernel_launcher" else name or "run"


def _refuse_other_types(job: Any) -> None:
    if isinstance(job, resolve("paceline.job:Job")):
        return
    is_function = callable(job)
    name = getattr(job, "__name__", "make_job")
    raise UsageError(
        f"the job is a {type(job).__name__}, expected a pl.Job or a path.",
        cause="this is the function that makes a job, not the job" if is_function else "",
        hint=f"{name}()" if is_function else 'pl.verify(make_job()), or pl.verify("job.py")',
    )


def _settings_arguments(settings: Settings | None) -> list[str]:
    """Return settings as command-line arguments; a setting whose value is None is left out.

    Raises:
        UsageError, Problems: an unknown name, or a value of the wrong type.
    """
    flat = {name: value for name, value in flatten(settings or {}).items() if value is not None}
    RequestedSettings().layered_over(
        {n: v for n, v in flat.items() if not str(n).startswith(f"{JOB}.")}, origin="settings="
    )
    return [f"--{name}={as_command_text(value)}" for name, value in flat.items()]


def _resume_argument(resume: str | Path | bool) -> str | None:
    if isinstance(resume, bool):
        return "" if resume else None
    if not str(resume).strip():
        raise UsageError("resume is empty: is a variable unset?", hint="resume=True resumes the newest run")
    return str(resume)


def _build_result(outcome: CommandOutcome, *, has_value: bool = False) -> Result:
    """Return the verb's result, or raise its error. With `has_value`, return the result even if the verb failed.

    Raises:
        KeyboardInterrupt: the verb was interrupted twice.
        PacelineError: the verb failed. Under another launcher, the exception of this rank is raised unchanged.
    """
    if outcome.exit_code == ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    if outcome.exit_code not in (ExitCode.DONE, ExitCode.DIFFERENT, ExitCode.STOPPED) and not has_value:
        raise _build_error(outcome)
    value = outcome.value if isinstance(outcome.value, Mapping) else {}
    launch_fields = {"exit_code": outcome.exit_code, "run": str(outcome.run), "seconds": outcome.seconds}
    return Result({**launch_fields, **value}, text=outcome.screen)


def _build_error(outcome: CommandOutcome) -> BaseException:
    """Return the error of the first failing rank. Under another launcher, return the exception of this rank.

    The error of the first failing rank is known only as text, and is rebuilt with its type from `paceline.errors`.
    `OutOfMemory` and `Problems` can't be built from text; they and all other types become a `RunError`.
    """
    fields = outcome.json_fields
    if outcome.error is not None:
        return _add_notes(outcome.error, fields)
    error_class = getattr(errors, str(fields.get("error", "")), RunError)
    if (
        not (isinstance(error_class, type) and issubclass(error_class, PacelineError))
        or error_class is errors.OutOfMemory
    ):
        error_class = RunError
    if "what" not in fields or error_class is errors.Problems:
        error: PacelineError = RunError(outcome.screen or f"the run ended with exit code {outcome.exit_code}.")
    else:
        message = (
            str(fields["what"]) if error_class.__name__ == fields["error"] else f"{fields['error']}: {fields['what']}"
        )
        rank = fields.get("rank")
        where = ", ".join(filter(None, ["" if rank is None else f"rank {rank}", str(fields.get("where", ""))]))
        error = error_class(message, where=where, cause=str(fields.get("cause", "")), hint=str(fields.get("hint", "")))
    error.exit_code = ExitCode(outcome.exit_code)
    return _add_notes(error, fields)


def _add_notes(error: BaseException, fields: Mapping[str, Any]) -> BaseException:
    """Add the path of the full log and the command that resumes the run to the error."""
    for line in (f"full text: {fields['log']}" if fields.get("log") else "", str(fields.get("go_on") or "")):
        if line:
            error.add_note(line)
    return error
