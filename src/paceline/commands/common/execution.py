"""The steps of verbs that start processes: build the task, choose the run folder, run the ranks, return the result."""

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from traceback import format_exception
from typing import Any

from paceline.checkpoint.files.checkpoint_folder import has_saves
from paceline.checkpoint.files.remote_store import check_remote_setting
from paceline.commands.command_table import StartOptions
from paceline.commands.common.devices import (
    choose_device,
    choose_ranks,
    choose_ranks_of_nodes,
    refuse_missing_backend,
    refuse_nested_threads,
)
from paceline.commands.common.layout_problems import fewer_rank_counts, layout_problems
from paceline.commands.common.option_checks import (
    check_job_parameters,
    refuse_invalid_run_dir,
    refuse_job_parameters,
    refuse_on_nodes,
    word_hints,
)
from paceline.commands.common.resume_command import build_resume_command, build_retry_command
from paceline.config.compression import Compression, parse_compress
from paceline.config.job_reference import JobRef, parameter_sources, parse_jobref
from paceline.config.layout import LayoutKind, parse_layout
from paceline.config.merge_settings import RequestedSettings, merge, merge_without_job, read_requested_settings
from paceline.config.settings import Settings
from paceline.config.task import Task
from paceline.config.update_rule import UpdateRule, parse_update
from paceline.console.formatting import format_duration, plural
from paceline.console.output import print_line
from paceline.errors import ExitCode, PacelineError, list_problems, raise_all
from paceline.faults import parse_faults, refuse_idle_faults
from paceline.filesystem.atomic_files import read_json
from paceline.launch.failures.failure_record import Failure, failure_from_exception
from paceline.launch.failures.uncaught_exceptions import failure_sentence, is_echo, name_first_cause, report_failure
from paceline.launch.joined_rank import joined_rank
from paceline.launch.launch_environment import choose_exact_kernels, torch_imported_error
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.launcher_variables import JoinedWorld, detect_world
from paceline.launch.rendezvous import adopt_launcher_variables
from paceline.launch.run_outcome import (
    LaunchOutcome,
    can_resume_run,
    describe_resume_point,
    failure_as_json,
    final_message,
    joined_failure_as_json,
)
from paceline.launch.several_nodes.node_group import NodeGroup
from paceline.nodes.node_place import NodePlace
from paceline.planner.layout.compression_checks import refuse_compression
from paceline.planner.layout.execution_plan import Resources, choose_threads
from paceline.planner.layout.host_resources import usable_cores
from paceline.planner.layout.update_rule_checks import rule_planning
from paceline.plugins import resolve
from paceline.reporting.sinks.log_tail import LogTail
from paceline.reporting.sinks.sink_registry import check_names
from paceline.run_folder.run_folder import RunFolder
from paceline.user_code import hide_paceline_frames


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
    place: NodePlace | None = None
    """The place of this process if it starts the ranks of one of several nodes."""
    ranks_per_node: int | None = None
    is_submitted: bool = False
    """Whether the options are those of `paceline submit`, so that hints are in its words."""
    job_handle: int | None = None
    """The file descriptor from `open_job_file`, if the job is a Python object."""


def run_options(options: StartOptions) -> RunOptions:
    """Return the command-line options of a verb as `RunOptions`."""
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
    """The result of a verb. `value` is what rank 0 returned, and `screen` the text to print."""

    exit_code: int
    run: Path
    seconds: float = 0.0
    screen: str = ""
    value: Any = None
    json_fields: Mapping[str, Any] = field(default_factory=dict)
    """The content of `screen` under the keys of `--json`."""
    launch_outcome: LaunchOutcome | None = None
    """The outcome of processes that were started here; None under another launcher."""
    prints_result: bool = True
    """False on a rank that prints nothing. Under another launcher, rank 0 prints the result, and the first rank that
    fails prints the error."""
    error: BaseException | None = None
    """The exception that ended this rank, if another launcher started it."""

    @property
    def failure(self) -> Failure | None:
        """Return the first failure of the processes that were started here, or None."""
        return None if self.launch_outcome is None else self.launch_outcome.failure

    def summary(self) -> dict[str, Any]:
        """Return the keys of `--json` that every verb has."""
        return {"exit_code": self.exit_code, "run": str(self.run), "seconds": self.seconds, **self.json_fields}


def make_task(verb: str, job: str, common: RunOptions, overrides: Sequence[str]) -> Task:
    """Return the task of a verb, after every check that is possible before a process starts.

    Raises:
        PacelineError, Problems: a check failed; all problems are reported together.
    """
    problems: list[PacelineError] = []
    ref = collect_problems(problems, lambda: _read_job_reference(job, common))
    read = collect_problems(problems, lambda: read_requested_settings(file=common.config, overrides=overrides))
    requested: RequestedSettings = read or RequestedSettings()
    settings = collect_problems(problems, lambda: merge(requested))
    problems += [] if settings is None else _destination_problems(verb, settings)
    place, layout_text = common.place, common.layout
    joined = None if place is not None else collect_problems(problems, lambda: detect_world(os.environ))
    device = choose_device(common.device, problems)
    requested_layout = None if layout_text is None else collect_problems(problems, lambda: parse_layout(layout_text))
    uses_threads = requested_layout is not None and requested_layout.kind is LayoutKind.THREADS
    ranks = choose_ranks(common.ranks, None if uses_threads else joined, device, problems)
    update = collect_problems(problems, lambda: parse_update(common.update)) or UpdateRule()
    if place is not None:
        ranks = choose_ranks_of_nodes(common.ranks_per_node, place, requested_layout, device, problems)
        problems += refuse_on_nodes(place, ranks=common.ranks, layout=requested_layout, settings=settings)
        problems += rule_planning(update).refuse_nodes(update, num_nodes=place.num_nodes, num_ranks=ranks)
    compress = collect_problems(problems, lambda: parse_compress(common.compress)) or Compression()
    layout = requested_layout if layout_text is not None else parse_layout("single" if ranks == 1 else update.layout)
    faults = collect_problems(problems, lambda: parse_faults(common.faults)) or ()
    if uses_threads:
        refuse_nested_threads(joined, faults, problems)
    elif settings is not None and joined is None and ranks > 1:
        problems += refuse_missing_backend(settings.train.backend)
    problems += () if joined is None else rule_planning(update).refuse_launcher(update, launcher=joined.kind)
    problems += [] if common.job_handle is None else refuse_job_parameters(requested)
    problems += [] if ref is None else check_job_parameters(parameter_sources(ref), requested)
    if common.run_dir is not None:
        problems += refuse_invalid_run_dir(common.run_dir)
    is_count_free = common.ranks is None and place is None and (joined is None or uses_threads)
    if is_count_free and layout is not None and layout.ranks:
        ranks = layout.ranks + update.servers
    if layout is not None:
        processes, steps = layout.processes(ranks=ranks), settings.train.steps if settings else None
        problems += refuse_idle_faults(faults, ranks=processes, steps=steps, servers=update.servers)
        problems += layout_problems(verb, layout, update, ranks, settings, requested)
        problems += refuse_compression(compress, update, layout, ranks=ranks, settings=settings)
    raise_all(word_hints(problems, place=place, is_submitted=common.is_submitted))
    assert layout is not None and settings is not None
    return Task(
        verb=verb, job=job,
        run=common.run_dir or settings.run_dir or "",
        layout=str(layout),
        update=str(update), typed_update=common.update,
        compress=str(compress),
        ranks=ranks,
        nodes="" if place is None else place.option,
        device=device,
        settings=requested.values,
        origins=requested.origins,
        faults=common.faults,
        job_handle=common.job_handle,
    )  # fmt: skip


def _read_job_reference(job: str, common: RunOptions) -> JobRef | None:
    """Return the reference to the job; None for a job that is a Python object."""
    if common.job_handle is not None:
        return None
    return parse_jobref(job, is_on_nodes=common.place is not None and not common.place.is_played)


def _destination_problems(verb: str, settings: Settings) -> list[PacelineError]:
    """Return errors for sinks that do not exist, and for a remote store that can't be used."""
    problems: list[PacelineError] = []
    collect_problems(problems, lambda: check_names(settings.watch.to))
    if verb == "train":
        collect_problems(problems, lambda: check_remote_setting(settings))
    return problems


def execute(
    task: Task,
    *,
    entry: str,
    common: RunOptions,
    one_thread: bool = False,
    logs: Path | None = None,
    nodes: NodeGroup | None = None,
) -> CommandOutcome:
    """Run `entry` on every rank: in this process if another launcher started it, else in new processes.

    `entry` is a reference, `module:function`. With `one_thread`, each rank computes with one thread and exact kernels.
    With `logs`, the ranks' logs are written to that folder, and the run folder does not change.
    """
    joined = detect_world(os.environ)
    if task.run and logs is None and (joined is None or joined.rank == 0):
        RunFolder(Path(task.run)).answer(task.verb).unlink(missing_ok=True)
    if joined is not None:
        adopt_launcher_variables(joined, os.environ)
        with redirect_stdout(sys.stderr) if common.quiet else nullcontext():  # standard output is only for the result
            return _execute_joined(task, entry, joined, one_thread, is_folder_named=bool(common.run_dir))
    settings = merge_without_job(task.settings)
    exact = settings.train.exact or one_thread
    tails: list[LogTail] = []
    fewer_ranks = fewer_rank_counts(task, settings)
    if fewer_ranks or nodes is not None:
        task = replace(task, requested_ranks=task.ranks, ranks=task.ranks if nodes is None else nodes.num_ranks)
    num_processes = parse_layout(task.layout).processes(ranks=task.ranks)

    def follow_logs(folder: Path) -> Callable[[], None]:
        if not common.quiet and not tails:
            where = "" if nodes is None else f" on {plural(nodes.num_nodes, 'node')}"
            print_line(f"starting {plural(num_processes, 'process')}{where}; logs in {task.run}/logs")
        if tails:
            tails[-1].close()
        tails.append(LogTail(folder))
        return tails[-1] if not common.quiet else _do_nothing

    request = LaunchRequest(
        ranks=num_processes,
        fewer_ranks=fewer_ranks,
        run=RunFolder(logs or Path(task.run)),
        entry=entry,
        payload=task.as_json(),
        threads=_choose_threads(task, settings, nodes=nodes, one_thread=exact),
        exact=exact,
        saves_checkpoints=task.verb == "train",
        servers=parse_update(task.update).servers,
        nodes=nodes,
    )
    launch_outcome = start(request, on_start=follow_logs)
    if tails and not common.quiet:
        tails[-1].close()
        if launch_outcome.restarts and not launch_outcome.exit_code:
            times = plural(launch_outcome.restarts, "time")
            print_line(f"restarted {times}; {format_duration(launch_outcome.seconds)} in all")
    outcome = command_outcome(task, launch_outcome)
    return outcome if nodes is None else _with_losses(outcome, nodes, is_quiet=common.quiet)


def _with_losses(outcome: CommandOutcome, nodes: NodeGroup, *, is_quiet: bool) -> CommandOutcome:
    """Print a line about each node without which the run went on, and return the outcome with these lines."""
    losses = nodes.loss_lines
    for line in () if is_quiet else losses:
        print_line(line)
    return replace(outcome, json_fields={**outcome.json_fields, "lost_nodes": losses}) if losses else outcome


def _choose_threads(task: Task, settings: Settings, *, nodes: NodeGroup | None, one_thread: bool) -> int:
    """Return the number of threads of a rank: the requested number, or an equal share of its machine's cores."""
    ranks_per_node = None if nodes is None else nodes.ranks_per_node
    resources = Resources(ranks=task.ranks, cores=usable_cores(), ranks_per_node=ranks_per_node)
    return choose_threads(resources=resources, one_thread=one_thread, requested=settings.train.threads)


def read_result(task: Task, verb: str) -> Any:
    """Return the result that rank 0 wrote for the verb; None if there is none."""
    path = RunFolder(Path(task.run)).answer(verb)
    return read_json(path) if path.exists() else None


def command_outcome(task: Task, launch_outcome: LaunchOutcome) -> CommandOutcome:
    """Return the result of a launch: the final message and, if memory ran out, layouts that need less memory."""
    resume_command = build_resume_command(task) if task.verb == "train" and launch_outcome.can_resume else ""
    extra_lines: tuple[str, ...] = ()
    if resume_command and launch_outcome.failure is not None and launch_outcome.failure.is_short_of_memory:
        from paceline.measured_planning.auto_layout import apply_layout
        from paceline.measured_planning.oom_advice import advise_after_oom, model_profile_of_run

        advice = advise_after_oom(
            task,
            launch_outcome.failure,
            profile_model=model_profile_of_run,
            command_for=lambda layout: build_retry_command(apply_layout(task, [layout])),
        )
        extra_lines, resume_command = (
            advice.lines,
            build_retry_command(apply_layout(task, [advice.first_layout]))
            if advice.first_layout is not None
            else resume_command,
        )
    screen = final_message(launch_outcome, resume_command=resume_command, extra_lines=extra_lines)
    if screen and resume_command and task.nodes:
        screen = f"{screen}\n{describe_resume_point(RunFolder(Path(task.run)))}"
    json_fields: dict[str, Any] = {"restarts": launch_outcome.restarts} if task.verb == "train" else {}
    json_fields |= failure_as_json(launch_outcome, resume_command=resume_command)
    json_fields |= {"changes": list(extra_lines)} if extra_lines else {}
    return CommandOutcome(
        exit_code=launch_outcome.exit_code, run=Path(task.run), seconds=launch_outcome.seconds, screen=screen,
        json_fields=json_fields,
        launch_outcome=launch_outcome,
    )  # fmt: skip


def _execute_joined(
    task: Task, entry: str, joined: JoinedWorld, one_thread: bool, *, is_folder_named: bool
) -> CommandOutcome:
    """Run `entry` in this process, which is a rank that another launcher started."""
    settings = merge_without_job(task.settings)
    exact = settings.train.exact or one_thread
    if exact and not choose_exact_kernels() and settings.train.exact:
        raise torch_imported_error(
            f"`{task.verb}` was called by a program that imports torch, in a process of {joined.kind}"
        )
    run_rank = resolve("paceline.launch.agent.worker_process:run_joined")  # imports torch
    payload = task.as_json()
    replicas = task.ranks // joined.world_size
    per_node = joined.local_world_size * replicas
    resources = Resources(ranks=task.ranks, cores=usable_cores(), ranks_per_node=per_node)
    threads = choose_threads(resources=resources, one_thread=exact, requested=settings.train.threads)
    knows_folder = joined.rank == 0 or is_folder_named  # without --run-dir, rank 0 chooses the folder for itself
    resume_command = build_resume_command(task, joined) if task.verb == "train" and knows_folder else ""
    working_folder, start_time = Path.cwd(), time.monotonic()
    rank_outcome = run_rank(entry, payload, threads=threads)
    os.chdir(working_folder)  # the job may have changed the working directory
    outcome = CommandOutcome(
        exit_code=int(rank_outcome.code), run=Path(task.run), seconds=time.monotonic() - start_time,
        prints_result=joined.rank == 0,
        error=rank_outcome.error,
    )  # fmt: skip
    if rank_outcome.error is not None:
        failure = name_first_cause(failure_from_exception(rank_outcome.error, rank=joined.rank))
        resume_command = resume_command if can_resume_run(outcome.run, outcome.exit_code, failure) else ""
        resume_line = f"Resume: {resume_command}" if resume_command and joined.rank == 0 else ""
        return replace(
            outcome,
            screen=resume_line,
            json_fields=joined_failure_as_json(failure, log=joined_rank.log, resume_command=resume_command),
        )
    stop_line = (
        f"Stopped and saved. Resume: {resume_command}"
        if rank_outcome.code == ExitCode.STOPPED and joined.rank == 0
        else ""
    )
    return replace(outcome, screen=stop_line)


def failure_result(outcome: CommandOutcome) -> CommandOutcome:
    """Return the outcome with the text that this rank of another launcher prints about its failure.

    An outcome without an error is returned unchanged.
    """
    if outcome.error is None:
        return outcome
    failure, scope = report_failure(outcome.error)
    text = failure_sentence(failure, scope)
    # `said` has the fields of a `PacelineError`, whose text needs no traceback. It is empty for other exceptions.
    is_unexplained = scope.prints_all and not failure.said and not is_echo(failure)
    if is_unexplained and joined_rank.log is None:
        hide_paceline_frames(outcome.error)
        text = "".join(format_exception(outcome.error)) + text
    lines = [text] if scope.prints_all or scope.prints_line else []
    if is_unexplained and joined_rank.log is not None:
        lines.append(f"Full text: {joined_rank.log}")
    # If another rank has already reported the cause of this failure, a resume is suggested only if a checkpoint exists.
    is_only_echo = scope.is_already_reported and is_echo(failure)
    shows_resume = outcome.screen and not (is_only_echo and not has_saves(RunFolder(outcome.run).checkpoints))
    screen = "\n".join([*lines, *([outcome.screen] if shows_resume else [])])
    if screen and not scope.prints_all:
        print_line(screen, sys.stderr)
    return replace(outcome, prints_result=scope.prints_all, screen=screen)


def collect_problems(problems: list[PacelineError], read: Callable[[], Any]) -> Any:
    """Return the result of `read`; if `read` raises a `PacelineError`, add the problems and return None."""
    try:
        return read()
    except PacelineError as error:
        problems += list_problems(error)
        return None


def _do_nothing() -> None:
    return None
