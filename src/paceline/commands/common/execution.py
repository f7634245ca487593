"""The steps of verbs that start processes: build the task, choose the run folder, run the ranks, return the result."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from traceback import format_exception
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import has_saves
from paceline.commands.command_table import Starting
from paceline.commands.common.devices import choose_device, choose_ranks, refuse_missing_backend, refuse_nested
from paceline.commands.common.option_checks import misfit_parameters, parameters_of_object, unusable_run_dir
from paceline.commands.common.resume_command import command_again, command_with
from paceline.config.compression import Compression, parse_compress
from paceline.config.job_reference import parameter_sources, parse_jobref
from paceline.config.layout import Layout, LayoutKind, parse_layout
from paceline.config.loading import TYPED, RequestedSettings, merge, read_asked
from paceline.config.settings import Settings
from paceline.config.task import Task
from paceline.config.update_rule import UpdateRule, parse_update
from paceline.console.formatting import plural
from paceline.console.output import print_line
from paceline.errors import ExitCode, PacelineError, UsageError, problems_of, raise_all
from paceline.faults import parse_faults, refuse_idle_faults
from paceline.filesystem.atomic_files import read_json
from paceline.launch.environments import JoinedWorld, detect_world
from paceline.launch.failures.failure_record import Failure, failure_from_exception
from paceline.launch.failures.uncaught_exceptions import failure_sentence, is_echo, report_failure
from paceline.launch.launcher import (
    LaunchOutcome,
    LaunchRequest,
    can_resume_run,
    choose_exact_kernels,
    failure_as_json,
    final_message,
    joined_failure_as_json,
    start,
    torch_imported_error,
)
from paceline.launch.rendezvous import adopt_launcher_variables
from paceline.planner.layout.axis_products import check_axis_products
from paceline.planner.layout.compression_checks import refuse_compression
from paceline.planner.layout.execution_plan import Resources, choose_threads
from paceline.planner.layout.host_resources import usable_cores
from paceline.planner.layout.layout_checks import check_layout_settings, refuse_unused_place_settings
from paceline.planner.layout.mesh import resolve_mesh
from paceline.planner.layout.update_rule_checks import check_update_settings, rule_planning
from paceline.plugins import resolve
from paceline.reporting.sinks.log_tail import LogTail
from paceline.reporting.sinks.sink_registry import check_names
from paceline.run_folder.run_folder import RunFolder, choose_run, new_run, number_run
from paceline.user_code import hide_own_frames


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options common to all verbs that start processes."""

    ranks: int | None = None
    layout: str | None = None
    update: str = "sync"
    compress: str = "none"
    device: str = "auto"
    config: Path | None = None
    run_dir: str | None = None
    faults: str = ""
    dry_run: bool = False
    quiet: bool = False
    job_handle: int | None = None
    """The handle from `open_job_file`, if the job is a Python object."""


def run_options(options: Starting) -> RunOptions:
    """Return the options of a verb's command line in the form that all verbs take."""
    return RunOptions(
        ranks=options.ranks,
        layout=options.layout,
        update=options.update,
        compress=options.compress,
        device=options.device,
        config=options.config,
        run_dir=options.run_dir,
        faults=options.faults,
        dry_run=options.dry_run,
        quiet=options.json,
    )


@dataclass(frozen=True, kw_only=True)
class CommandOutcome:
    """The result of a verb."""

    exit_code: int
    run: Path
    seconds: float = 0.0
    screen: str = ""
    value: Any = None
    keys: Mapping[str, Any] = field(default_factory=dict)
    """The content of `screen` under the keys of `--json`."""
    launched: LaunchOutcome | None = None
    """The outcome of processes that were started here; None under another launcher."""
    tells: bool = True
    """False on silent ranks of another launcher: rank 0 prints results, the first failing rank prints errors."""
    error: BaseException | None = None
    """The exception that ended this rank, if another launcher started it."""

    @property
    def failure(self) -> Failure | None:
        """Return the first failure of processes that were started here."""
        return None if self.launched is None else self.launched.failure

    def summary(self) -> dict[str, Any]:
        """Return the keys of `--json` that every verb has."""
        return {"exit_code": self.exit_code, "run": str(self.run), "seconds": self.seconds, **self.keys}


def make_task(verb: str, job: str, common: RunOptions, overrides: Sequence[str]) -> Task:
    """Check everything that can be checked before a process starts.

    Raises:
        PacelineError, Problems: all problems at once.
    """
    problems: list[PacelineError] = []
    ref = None if common.job_handle is not None else collect(problems, lambda: parse_jobref(job))
    asked = collect(problems, lambda: read_asked(file=common.config, overrides=overrides)) or RequestedSettings()
    settings = collect(problems, lambda: merge(asked))
    if settings is not None:
        collect(problems, lambda: check_names(settings.watch.to))
    joined = collect(problems, lambda: detect_world(os.environ))
    device = choose_device(common.device, problems)
    text = common.layout
    asked_layout = None if text is None else collect(problems, lambda: parse_layout(text))
    threads = asked_layout is not None and asked_layout.kind is LayoutKind.THREADS
    ranks = choose_ranks(common.ranks, None if threads else joined, device, problems)
    update = collect(problems, lambda: parse_update(common.update)) or UpdateRule()
    compress = collect(problems, lambda: parse_compress(common.compress)) or Compression()
    layout = asked_layout if text is not None else parse_layout("single" if ranks == 1 else update.layout)
    faults = collect(problems, lambda: parse_faults(common.faults)) or ()
    if threads:
        refuse_nested(joined, faults, problems)
    elif settings is not None and joined is None and ranks > 1:
        problems += refuse_missing_backend(settings.train.backend)
    if joined is not None:
        problems += rule_planning(update).refuse_launcher(update, launcher=joined.kind)
    if common.job_handle is not None:
        problems += parameters_of_object(asked)
    if ref is not None:
        problems += misfit_parameters(parameter_sources(ref), asked)
    if layout is not None and layout.ranks and common.ranks is None and (joined is None or threads):
        ranks = layout.ranks + update.servers
    if common.run_dir is not None:
        problems += unusable_run_dir(common.run_dir)
    if layout is not None:
        processes = layout.processes(ranks=ranks)
        problems += refuse_idle_faults(faults, ranks=processes, steps=settings.train.steps if settings else None)
        problems += _misfits(verb, layout, update, ranks, settings, asked)
        problems += refuse_compression(compress, update, layout, ranks=ranks, settings=settings)
    raise_all(problems)
    assert layout is not None and settings is not None
    return Task(
        verb=verb,
        job=job,
        run=common.run_dir or settings.run_dir or "",
        layout=str(layout),
        update=str(update),
        compress=str(compress),
        ranks=ranks,
        device=device,
        settings=asked.values,
        origins=asked.origins,
        faults=common.faults,
        job_handle=common.job_handle,
    )


def _misfits(
    verb: str, layout: Layout, update: UpdateRule, ranks: int, settings: Settings | None, asked: RequestedSettings
) -> list[PacelineError]:
    """Return the conflicts of layout, ranks and settings. In `compare`, some layouts may not use every setting."""
    problems: list[PacelineError] = []
    rule = rule_planning(update)
    workers = rule.num_workers(update, ranks=ranks, problems=problems)
    mesh = resolve_mesh(layout, ranks=workers, problems=problems, update=update)
    problems += [*check_axis_products(layout, mesh), *rule.refuse_layout(update, layout, mesh)]
    if settings is not None:
        typed = [name for name, origin in asked.origins.items() if origin == TYPED and verb != "compare"]
        problems += [*check_layout_settings(layout, mesh, settings), *check_update_settings(update, settings)]
        problems += refuse_unused_place_settings(layout, mesh, settings, requested=typed)
    return problems


def with_run(task: Task, *, resume: str | None) -> Task:
    """Return the task with its run folder: a new one, the newest, or the named one. Only rank 0 of a world chooses."""
    joined = detect_world(os.environ)
    if joined is not None and joined.rank != 0:
        return task
    name = task.short_job
    run, start = choose_run(name, run=task.run, resume=resume)
    if run is None:
        return replace(task, run=str(new_run(name).path))
    make_folder(run.path)
    return replace(task, run=str(run.path), resume=start)


def execute(
    task: Task, *, entry: str, common: RunOptions, one_thread: bool = False, logs: Path | None = None
) -> CommandOutcome:
    """Run `entry` on every rank: in this process if another launcher started it, else in new processes.

    With `logs`, the ranks' logs are written there and the run folder does not change.
    """
    joined = detect_world(os.environ)
    if task.run and logs is None and (joined is None or joined.rank == 0):
        RunFolder(Path(task.run)).answer(task.verb).unlink(missing_ok=True)
    if joined is not None:
        adopt_launcher_variables(joined, os.environ)
        with redirect_stdout(sys.stderr) if common.quiet else nullcontext():  # standard output is only for the result
            return _joined(task, entry, joined, one_thread, is_named=bool(common.run_dir))
    settings = merge(RequestedSettings(values={k: v for k, v in task.settings.items() if not k.startswith("job.")}))
    exact = settings.train.exact or one_thread
    tails: list[LogTail] = []
    count = parse_layout(task.layout).processes(ranks=task.ranks)

    def follow(folder: Path) -> Callable[[], None]:
        if not common.quiet:
            print_line(f"starting {plural(count, 'process')}; logs in {task.run}/logs")
        if tails:
            tails[-1].close()
        tails.append(LogTail(folder))
        return tails[-1] if not common.quiet else _nothing

    request = LaunchRequest(
        ranks=count,
        run=RunFolder(logs or Path(task.run)),
        entry=entry,
        payload=task.as_json(),
        threads=choose_threads(
            cluster=Resources(ranks=task.ranks, cores=usable_cores()),
            one_thread=exact,
            requested=settings.train.threads,
        ),
        exact=exact,
        saves_checkpoints=task.verb == "train",
        servers=parse_update(task.update).servers,
    )
    launched = start(request, on_start=follow)
    if tails and not common.quiet:
        tails[-1].close()
    return command_outcome(task, launched)


def read_result(task: Task, verb: str) -> Any:
    """Return the result that rank 0 wrote for the command."""
    path = RunFolder(Path(task.run)).answer(verb)
    return read_json(path) if path.exists() else None


def command_outcome(task: Task, launched: LaunchOutcome) -> CommandOutcome:
    """Return the result of a launch: the final message and, if memory ran out, layouts that need less."""
    go_on = command_again(task) if task.verb == "train" and launched.can_resume else ""
    more: tuple[str, ...] = ()
    if go_on and launched.failure is not None and launched.failure.is_short_of_memory:
        from paceline.measured_planning.auto_layout import on_rung
        from paceline.measured_planning.oom_advice import cheaper_layouts, model_profile_of_run

        found = cheaper_layouts(
            task, launched.failure, learn=model_profile_of_run, typed=lambda rung: command_with(on_rung(task, [rung]))
        )
        more, go_on = found.lines, command_with(on_rung(task, [found.first])) if found.first is not None else go_on
    screen = final_message(launched, resume_command=go_on, extra_lines=more)
    keys = failure_as_json(launched, resume_command=go_on) | ({"changes": list(more)} if more else {})
    return CommandOutcome(
        exit_code=launched.exit_code, run=Path(task.run), seconds=launched.seconds, screen=screen, keys=keys,
        launched=launched,
    )  # fmt: skip


def _joined(task: Task, entry: str, joined: JoinedWorld, one_thread: bool, *, is_named: bool) -> CommandOutcome:
    settings = merge(RequestedSettings(values={k: v for k, v in task.settings.items() if not k.startswith("job.")}))
    exact = settings.train.exact or one_thread
    if exact and not choose_exact_kernels() and settings.train.exact:
        raise torch_imported_error(
            f"`{task.verb}` was called by a program that imports torch, in a process of {joined.kind}"
        )
    child = resolve("paceline.launch.agent.worker_process:run_joined")  # imports torch
    payload = task.as_json()
    replicas = task.ranks // joined.world_size
    per_node = joined.local_world_size * replicas
    cluster = Resources(ranks=task.ranks, cores=usable_cores(), ranks_per_node=per_node)
    threads = choose_threads(cluster=cluster, one_thread=exact, requested=settings.train.threads)
    knows = task.verb == "train" and (joined.rank == 0 or is_named)  # rank 0 alone knows a folder that it chose
    go_on = command_again(task, joined) if knows else ""
    here, began = Path.cwd(), time.monotonic()
    ended = child(entry, payload, threads=threads)
    os.chdir(here)  # the job may have changed the working directory
    outcome = CommandOutcome(
        exit_code=int(ended.code), run=Path(task.run), seconds=time.monotonic() - began, tells=joined.rank == 0,
        error=ended.error,
    )  # fmt: skip
    if ended.error is not None:
        failure = failure_from_exception(ended.error, rank=joined.rank)
        go_on = go_on if can_resume_run(outcome.run, outcome.exit_code, failure) else ""
        last = f"Resume: {go_on}" if go_on and joined.rank == 0 else ""
        return replace(outcome, screen=last, keys=joined_failure_as_json(failure, resume_command=go_on))
    stopped = f"Stopped and saved. Resume: {go_on}" if ended.code == ExitCode.STOPPED and joined.rank == 0 else ""
    return replace(outcome, screen=stopped)


def failure_result(outcome: CommandOutcome) -> CommandOutcome:
    """Return the outcome with the text that this rank prints about its failure; unchanged if there is no failure."""
    if outcome.error is None:
        return outcome
    failure, turn = report_failure(outcome.error)
    text = failure_sentence(failure, turn)
    if turn.prints_all and not failure.said and not is_echo(failure):
        hide_own_frames(outcome.error)
        text = "".join(format_exception(outcome.error)) + text
    lines = [text] if turn.prints_all or turn.prints_line else []
    is_only_echo = turn.is_already_reported and is_echo(failure)  # only a checkpoint shows that resuming helps
    shows_resume = outcome.screen and not (is_only_echo and not has_saves(RunFolder(outcome.run).checkpoints))
    screen = "\n".join([*lines, *([outcome.screen] if shows_resume else [])])
    if screen and not turn.prints_all:
        print_line(screen, sys.stderr)
    return replace(outcome, tells=turn.prints_all, screen=screen)


def make_folder(path: Path) -> None:
    """Create the named run folder, if it does not exist.

    Raises:
        UsageError: it can't be written, or it is the home folder or a folder above the working directory.
    """
    refuse_shared_folder(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
        number_run(path)
        with TemporaryFile(dir=path):  # an existing folder may belong to another user or be on a read-only disk
            pass
    except OSError as error:
        raise unwritable_folder_error(path, error) from None


def refuse_shared_folder(path: Path) -> None:
    """Refuse the home folder, or a folder above it or above the working directory, as a run folder."""
    whole, home = path.resolve(), _home_folder()
    if whole in (*Path.cwd().parents, *home, *(parent for folder in home for parent in folder.parents)):
        raise UsageError(
            f"--run-dir {path} is {whole}: the run's files would mix with everything else there.",
            hint="--run-dir runs/NAME",
        )


def unwritable_folder_error(path: Path, error: OSError) -> UsageError:
    """Return the error for a run folder that can't be created or written."""
    return UsageError(f"the run folder {path} can't be written: {error.strerror}.", hint="--run-dir on a writable disk")


def _home_folder() -> list[Path]:
    """Return the user's home folder; a bare user id in a container may have none."""
    try:
        return [Path.home().resolve()]
    except RuntimeError:
        return []


def collect(problems: list[PacelineError], read: Callable[[], Any]) -> Any:
    """Return what `read` returns; if it raises a `PacelineError`, add its problems and return None."""
    try:
        return read()
    except PacelineError as error:
        problems += problems_of(error)
        return None


def _nothing() -> None:
    return None
