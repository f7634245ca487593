"""Prepare a job before any process group exists: load it, merge its settings, make its plan, choose its run folder."""

import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from paceline.comm.process_group import LaunchInfo, World
from paceline.config.compression import parse_compress
from paceline.config.job_reference import parse_jobref
from paceline.config.layout import parse_layout
from paceline.config.merge_settings import JOB, JOB_SETTINGS, RequestedSettings, merge
from paceline.config.settings import Settings
from paceline.config.task import Task
from paceline.config.update_rule import parse_update
from paceline.console.output import print_line
from paceline.errors import PacelineError, UsageError, list_problems, raise_all
from paceline.filesystem.atomic_files import read_json
from paceline.filesystem.run_lock import RunLock, lock_run_folder
from paceline.job import Job, load_job, refuse_job
from paceline.job_transfer import receive_job
from paceline.launch.failures.peer_machines import peer_machines
from paceline.launch.inherited_environment import attempt_folder, own_environ
from paceline.launch.joined_rank import joined_rank
from paceline.launch.launcher_variables import detect_world
from paceline.launch.requeued_run import current_scheduler_jobs, find_or_create_run
from paceline.planner.layout.execution_plan import ExecutionPlan, JobFacts, Resources, make_execution_plan
from paceline.planner.layout.host_resources import usable_cores
from paceline.planner.layout.rank_placement import refuse_scattered_ranks
from paceline.profiling.backends import available_backends
from paceline.run_folder.run_folder import RunFolder, choose_run
from paceline.step.update_rules import step_rule
from paceline.torch_internals.rng import seed_all, stream_key
from paceline.trainer.checks.evaluation_checks import check_evaluation_settings
from paceline.trainer.saving.resume_run import read_previous_failure
from paceline.trainer.setup.build_training_setup import job_settings


@dataclass(frozen=True, kw_only=True)
class PreparedJob:
    """A job with its settings and plan, before any process group exists.

    `requested` are the settings that were set explicitly, and `settings` are all settings with the defaults.
    """

    task: Task
    job: Job
    requested: RequestedSettings
    settings: Settings
    plan: ExecutionPlan


def _seed_before_job(requested: RequestedSettings) -> int:
    """Return the requested seed; the job's own settings are not known yet."""
    seed_value = {name: value for name, value in requested.values.items() if name == "seed"}
    return merge(RequestedSettings(values=seed_value)).seed


def prepare(task: Task, *, job: Job | None = None) -> PreparedJob:
    """Load the job, merge its settings with the requested settings, which override them, and make the plan."""
    requested = RequestedSettings(values=dict(task.settings), origins=dict(task.origins))
    if job is None and task.job_handle is not None:
        job = receive_job(task.job_handle)
    if job is None:
        job_values = {name: value for name, value in requested.values.items() if name.startswith("job.")}
        params = {name.removeprefix("job."): value for name, value in job_values.items()}
        start_folder = Path.cwd()
        # Random draws in the job file, such as a random_split, must be the same on every rank and after a restart.
        seed_all(stream_key(_seed_before_job(requested), "job"))
        job = load_job(parse_jobref(task.job), params=params)
        if Path.cwd() != start_folder:  # the job changed the working directory; the run's files stay where they were
            task = task.with_absolute_paths(start_folder)
    else:
        refuse_job(job, where=job.name or task.job)
    requested = requested.layered_over(job_settings(job), origin=JOB, where=JOB_SETTINGS)
    settings = merge(requested)
    problems: list[PacelineError] = []
    plan = None
    try:
        plan = make_plan(task, job, settings, micro_batch_size=settings.train.micro_batch_size)
    except PacelineError as error:
        problems += list_problems(error)
    try:
        if task.verb == "train":
            check_evaluation_settings(job, settings, evaluate_first=bool(task.options.get("evaluate_first")))
    except PacelineError as error:
        problems += list_problems(error)
    raise_all(problems)
    assert plan is not None
    return PreparedJob(task=task, job=job, requested=requested, settings=settings, plan=plan)


def make_plan(
    task: Task, job: Job, settings: Settings, *, micro_batch_size: int | None, is_resumed: bool = False
) -> ExecutionPlan:
    """Return the plan of the task's layout on its ranks. `is_resumed`: an earlier start has fixed the microbatches.

    Raises:
        PacelineError, Problems: the requested options exclude each other.
    """
    facts = JobFacts(
        global_batch_size=settings.train.global_batch_size or job.global_batch_size,
        micro_batch_size=micro_batch_size,
        accumulation=settings.train.gradient_accumulation_steps,
        one_thread=settings.train.exact or task.verb == "verify",
        threads=settings.train.threads,
        backend=settings.train.backend,
        built_in_backends=available_backends(),
        is_resumed=is_resumed,
    )
    return make_execution_plan(
        layout=parse_layout(task.layout),
        update=parse_update(task.update),
        compress=parse_compress(task.compress),
        resources=Resources(ranks=task.ranks, device=task.device, cores=usable_cores()),
        facts=facts,
    )


def with_saved_microbatches(prepared_job: PreparedJob, *, folder: Path, world: World) -> PreparedJob:
    """Return the job with the microbatch size that the run had at its first start, unless the user has set one."""
    path = folder / "plan.json"
    saved = world.share_json(_read_saved_plan(path) if world.is_main else None)
    train_settings, current_plan = prepared_job.settings.train, prepared_job.plan
    if saved is None or saved["global_batch_size"] != current_plan.global_batch_size:
        return prepared_job
    is_set_by_user = train_settings.micro_batch_size or train_settings.gradient_accumulation_steps
    is_unchanged = bool(is_set_by_user) or saved["micro_batch_size"] == current_plan.micro_batch_size
    micro_batch_size = train_settings.micro_batch_size if is_unchanged else saved["micro_batch_size"]
    task, job, settings = prepared_job.task, prepared_job.job, prepared_job.settings
    plan = make_plan(task, job, settings, micro_batch_size=micro_batch_size, is_resumed=True)
    if not is_unchanged:
        note = f"batch: microbatches of {plan.micro_batch_size}, as at the start of this run"
        plan = replace(plan, notes=(*plan.notes, note))
    return replace(prepared_job, plan=plan)


def _read_saved_plan(path: Path) -> dict[str, Any] | None:
    """Return the saved plan, or None if it can't be read. A run can resume without it."""
    try:
        plan = read_json(path)
    except (OSError, ValueError):
        return None
    return plan if isinstance(plan, dict) and {"global_batch_size", "micro_batch_size"} <= set(plan) else None


def join_world(prepared_job: PreparedJob) -> World:
    """Join the other ranks of this process's group.

    Raises:
        UsageError: the ranks are spread over the nodes in an order that does not suit the layout.
        MachineError: they can't be joined.
    """
    plan, seconds = prepared_job.plan, prepared_job.settings.train.timeout_seconds
    launch_info = LaunchInfo.read(os.environ)
    world = step_rule(plan.update_rule).join(plan, launch_info=launch_info, timeout_seconds=seconds)
    raise_all(refuse_scattered_ranks(plan.mesh, peer_machines.hosts if world.world_size > 1 else ()))
    return world


def is_gradient_worker(prepared_job: PreparedJob) -> bool:
    """Return True if this process only computes gradients for parameter servers."""
    rule = prepared_job.plan.update_rule
    return step_rule(rule).is_gradient_worker(rule, rank=LaunchInfo.read(os.environ).rank)


def with_run_folder(task: Task, *, is_chooser: bool) -> Task:
    """Return the task with a run folder and the checkpoint to resume from.

    Rank 0 chooses them (`is_chooser`). On other ranks, return the task unchanged.
    """
    if not is_chooser:
        return task
    name = task.short_job
    run, start = choose_run(name, run=task.run, resume=task.resume)
    run = run or find_or_create_run(name, current_scheduler_jobs(os.environ), request=task.request)
    run.path.mkdir(parents=True, exist_ok=True)
    return replace(task, run=str(run.path), resume=start)


def number_attempt(task: Task, world: World) -> int:
    """Return the number of this attempt. Paceline's launcher has numbered its own attempts.

    Under another launcher, rank 0 numbers the attempts of a training by creating their folders.
    """
    is_numbered = attempt_folder(os.environ) is not None or detect_world(os.environ) is None
    if task.verb != "train" or not world.is_main or is_numbered:
        return task.attempt
    run = RunFolder(Path(task.run))
    number = run.next_attempt()
    with suppress(OSError):  # the first save reports a disk that can't be written
        run.attempt_folder(number).mkdir(parents=True)
    return number


def begin_attempt(task: Task, *, run: RunFolder, number: int) -> Task:
    """Return the task with the number of its attempt.

    Under another launcher, also begin this rank's log and its other files. If torchrun has started the ranks again,
    rank 0 gets the failure of the attempt before.
    """
    task = replace(task, attempt=number)
    launcher = None if attempt_folder(os.environ) is not None else detect_world(os.environ)
    if launcher is None or task.verb != "train":
        return task
    joined_rank.open(run.attempt_folder(number), launcher)
    is_restart = own_environ(os.environ).get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if not is_restart or launcher.rank != 0 or not launcher.is_one_node:
        return task
    return replace(task, restart=read_previous_failure(run.attempt_folder(number - 1)))


def lock_run_dir(task: Task, *, world: World) -> RunLock | None:
    """Lock the run folder on rank 0, and return the lock. Return None if Paceline's launcher has locked it already.

    Raises:
        UsageError: another run writes to the folder; raised on every rank.
    """
    lock, problem = None, None
    if world.is_main and attempt_folder(os.environ) is None:
        try:
            lock = lock_run_folder(Path(task.run), on_wait=print_line)
            lock.close_in_forks()
        except UsageError as error:
            problem = error.as_json()
    problem = world.share_json(problem)
    if problem is not None:
        raise UsageError(problem["what"], cause=problem["cause"], hint=problem["hint"])
    return lock
