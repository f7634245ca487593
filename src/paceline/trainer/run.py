"""`pl.Run`: a run that a script or a rank of `paceline train` opens. A script runs under python, torchrun or srun."""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.files.remote_store import check_remote_setting
from paceline.config.compression import parse_compress
from paceline.config.job_reference import OBJECT_PREFIX
from paceline.config.layout import parse_layout
from paceline.config.merge_settings import JOB, JOB_SETTINGS, RequestedSettings, merge
from paceline.config.parse_auto_layout import is_auto
from paceline.config.resume_allowances import refuse_unknown_allowances
from paceline.config.task import Task
from paceline.config.update_rule import parse_update
from paceline.console.output import print_line
from paceline.data.types import StepInput
from paceline.errors import ExitCode, JobError, UsageError, current_user_line, raise_all
from paceline.events import EvalDone
from paceline.filesystem.atomic_files import read_json
from paceline.filesystem.run_lock import RunLock
from paceline.job import Job, refuse_job
from paceline.launch.agent.launcher_death import die_with_launcher, outlive_launcher
from paceline.launch.agent.malloc_settings import configure_malloc
from paceline.launch.agent.process_exit import run_finish
from paceline.launch.agent.signals import is_main_thread, stop_flag
from paceline.launch.failures.uncaught_exceptions import UncaughtHook, install_uncaught_hook, report_exit
from paceline.launch.inherited_environment import attempt_folder
from paceline.launch.joined_rank import joined_rank
from paceline.launch.launch_environment import choose_exact_kernels, torch_imported_error
from paceline.launch.launcher_variables import detect_world, world_size
from paceline.launch.rendezvous import adopt_launcher_variables
from paceline.launch.run_outcome import final_message
from paceline.planner.layout.execution_plan import refuse_backend
from paceline.planner.layout.host_resources import visible_gpus
from paceline.plugins import START_FOLDER, resolve
from paceline.profiling.backends import available_backends
from paceline.reporting.sinks.sink_registry import check_names
from paceline.step.generate import generate
from paceline.step.step_totals import StepResult
from paceline.trainer.parameter_server_worker import WorkerFinished, run_worker
from paceline.trainer.script_restart import (
    AUTO_LAYOUT_FIELDS,
    INHERITED_FIELDS,
    count_processes,
    count_threads,
    restart_arguments,
    restart_in_exact_mode,
    resume_arguments,
    script_command,
)
from paceline.trainer.session import Session, open_session
from paceline.trainer.setup.build_training_setup import job_settings
from paceline.trainer.setup.prepare import (
    PreparedJob,
    is_gradient_worker,
    join_world,
    lock_run_dir,
    prepare,
    with_run_folder,
)


class _UpdateGuard:
    """A guard against optimizer steps that the script makes in addition to those of the run."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._num_steps = 0
        self._handles = [optimizer.register_step_post_hook(self._count) for optimizer in optimizers]

    def _count(self, *_: object) -> None:
        self._num_steps += 1

    def check(self) -> None:
        """Check that no optimizer stepped since `clear`.

        Raises:
            UsageError: an optimizer stepped.
        """
        if self._num_steps:
            raise UsageError(
                "optimizer.step() was called outside run.step(batch), which already updates the weights.",
                cause="the loop does forward, backward or optimizer.step() itself, as without Paceline",
                hint="for batch in run.batches(): run.step(batch), and no more; docs/place.md is for your own loop",
            )

    def clear(self) -> None:
        """Reset the count after a step of the run."""
        self._num_steps = 0

    def remove(self) -> None:
        """Remove the hooks from the optimizers."""
        for handle in self._handles:
            handle.remove()


class Run:
    """A training run of `job`. Under plain Python with `ranks > 1`, the script restarts in that many worker processes.

    `settings` uses dotted names: `Run(job, ranks=2, settings={"train.steps": 100})`. `run_dir=` overrides the settings.
    """

    # A script calls `__init__`. In the worker processes of `paceline train`, `worker` makes the run.
    _prepared_job: PreparedJob | None = None
    _has_opened = False
    _update_guard: _UpdateGuard | None = None
    _hook: UncaughtHook | None = None
    _is_auto_layout = False
    _script_command: Sequence[str] = ()  # the script's command line, in a process that Paceline started for the script
    _run_lock: RunLock | None = None
    _has_signal_handler = False
    _previous_death_signal: int | None = None  # the parent-death signal before `die_with_launcher` set it
    _previous_threads = 0  # torch's thread count before this run set it

    def __init__(
        self,
        job: Job,
        *,
        layout: str | None = None,
        update: str = "sync",
        compress: str = "none",
        ranks: int | None = None,
        device: str = "auto",
        run_dir: str | Path | None = None,
        resume: str | Path | bool = False,
        allow: Sequence[str] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._hook = install_uncaught_hook()
        if not isinstance(job, Job):
            raise JobError(
                f"pl.Run({job!r}) got a {type(job).__name__}, expected a pl.Job.",
                hint="pl.Run(make_job()); for a file, paceline train job.py",
            )
        refuse_job(job, where=str(current_user_line() or ""))
        self.job = job
        self.exit_code = int(ExitCode.DONE)
        self._session: Session | None = None
        device_type = ("cuda" if visible_gpus() else "cpu") if device == "auto" else device
        self._is_auto_layout = is_auto(layout)
        if self._is_auto_layout:
            resolve("paceline.measured_planning.auto_layout:refuse_auto_options")(update=update, compress=compress)
            layout = None
        raise_all(refuse_unknown_allowances(tuple(allow)))
        parsed_layout = parse_layout(layout) if layout is not None else None
        rule, num_local_devices = parse_update(update), visible_gpus() if device_type == "cuda" else 1
        # As on the command line: if the layout fixes its number of ranks, the servers' ranks are added to it.
        layout_ranks = parsed_layout and parsed_layout.ranks and parsed_layout.ranks + rule.servers
        num_ranks = ranks or layout_ranks or world_size(os.environ) or num_local_devices or 1
        script = Path(sys.argv[0]).stem or "run"
        run_settings = {name: value for name, value in (settings or {}).items() if name != "run_dir" or not run_dir}
        requested_settings = RequestedSettings().layered_over(run_settings, origin="Run(settings=)")
        folder = str(run_dir or requested_settings.values.get("run_dir") or "")
        self._has_run_dir = bool(folder)
        merged_settings = merge(requested_settings.layered_over(job_settings(job), origin=JOB, where=JOB_SETTINGS))
        self._exact = merged_settings.train.exact
        check_names(merged_settings.watch.to)
        check_remote_setting(merged_settings)
        if num_ranks > 1:
            raise_all(refuse_backend(merged_settings.train.backend, available_backends()))
        self._task = Task(
            verb="train",
            job=f"{OBJECT_PREFIX}:{job.name or script}",
            layout=layout or ("single" if num_ranks == 1 else rule.layout),
            update=str(rule),
            compress=str(parse_compress(compress)),
            ranks=num_ranks,
            device=device_type,
            run=folder,
            resume=str(resume) if isinstance(resume, str | Path) else ("" if resume else None),
            allow=tuple(allow),
            settings=requested_settings.values,
            origins=requested_settings.origins,
        )

    @classmethod
    def worker(cls, task: Task) -> Self:
        """Return a run inside a worker process that the command started."""
        run = cls.__new__(cls)
        run._task = task
        run._session = None
        run.exit_code = int(ExitCode.DONE)
        run._prepared_job = prepare(task)
        if run._prepared_job.settings.train.exact and not choose_exact_kernels():
            cause = "Job(settings=) requests exact mode, but torch is already imported when the job is read"
            raise torch_imported_error(cause, hint=f"paceline {task.verb} {task.job} --train.exact")
        run.job = run._prepared_job.job
        return run

    @property
    def _is_in_script(self) -> bool:
        """True if the user's script made this run; False if `worker` made it in a rank of the command."""
        return self._prepared_job is None

    def open(self) -> Session:
        """Join the other ranks and return the session of this run. The caller must also close it."""
        self.__enter__()
        return self._active_session

    def __enter__(self) -> Self:
        try:
            self._join_or_start()
            Run._has_opened = True
            prepared_job = self._prepared_job or prepare(self._task, job=self.job)
            train = prepared_job.settings.train  # with the settings that the job adds
            if train.threads and not train.exact:
                self._set_threads(train.threads)
            if is_gradient_worker(prepared_job):
                raise WorkerFinished(run_worker(prepared_job))
            world = join_world(prepared_job)
            self._run_lock = lock_run_dir(prepared_job.task, world=world)
            self._session = open_session(prepared_job, world=world, on_eval_argument=self)
            if self._is_in_script and prepared_job.plan.update_rule.is_synchronous:
                self._update_guard = _UpdateGuard(self.optimizers)
        except BaseException as error:
            joined_rank.close(error)
            self._restore_process_state()
            self._remove_hook(error)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._finish(error)
        except BaseException as own_error:
            joined_rank.close(own_error)
            raise
        finally:
            joined_rank.close(error)
            self._restore_process_state()

    def _finish(self, error: BaseException | None) -> None:
        session = self._active_session
        if isinstance(error, SystemExit) and session.world.world_size > 1 and self._is_in_script:
            report_exit(error)
        if error is None:
            if self._is_in_script:
                session.loop.check_same_call("the end of the run")
            self.exit_code = run_finish.code = session.finish()
            session.close()
            if self._is_in_script:
                self._return_to_script(session)
        elif session.world.world_size == 1:
            session.close()
        self._remove_hook(error)

    def _remove_hook(self, error: BaseException | None) -> None:
        if self._hook is not None and error is None:
            self._hook.remove()
        elif self._hook is not None and error is not None:
            self._hook.restrict_to_error(error)

    def _return_to_script(self, session: Session) -> None:
        """Return control to the script, or exit if a signal stopped the run."""
        by_signal = bool(self.exit_code) and session.loop.stop_reason == "signal"
        is_reported_by_launcher = by_signal and attempt_folder(os.environ) is not None
        if self.exit_code and session.world.is_main and not is_reported_by_launcher:
            status_text = (
                "Stopped and saved." if by_signal else f"The run is at {session.loop.position_text} and saved."
            )
            print_line(f"{status_text} Resume: {self._resume_command(session.run.path)}", sys.stderr)
        if by_signal:
            sys.exit(self.exit_code)

    def _resume_command(self, folder: Path) -> str:
        """Return the command that resumes this run, with the arguments of `pl.Run` that the script must change."""
        change = resume_arguments(folder, resume=self._task.resume, has_run_dir=self._has_run_dir)
        launcher = None if self._script_command else detect_world(os.environ)
        return script_command(launcher, command=self._script_command or sys.orig_argv, change=change)

    def batches(self) -> Iterator[StepInput]:
        """Yield this replica's part of each global batch, until the run is over or a stop is requested."""
        return self._active_session.loop.batches()

    def step(self, batch: StepInput) -> StepResult:
        """Run forward, backward, reduction, clipping and update. Log, evaluate and save if they are due."""
        if self._update_guard is None:
            return self._active_session.loop.step(batch, needs_result=self._is_in_script)
        self._update_guard.check()
        result = self._active_session.loop.step(batch, needs_result=True)
        self._update_guard.clear()
        return result

    def evaluate(self, *, split: str = "eval") -> EvalDone:
        """Return the metrics over the whole split, of averaged weights if the job has `ema=`. All ranks call this."""
        if split not in ("eval", "test") or getattr(self.job, f"{split}_data") is None:
            raise UsageError(
                f"run.evaluate(split={split!r}): the job has no {split}_data."
                if split in ("eval", "test")
                else f"run.evaluate(split={split!r}): {split!r} is not a split.",
                hint='split="eval" evaluates on eval_data= of the job, split="test" on its test_data=',
            )
        self._active_session.loop.check_same_call("run.evaluate()")
        return self._active_session.loop.evaluate(split=split)

    def save(self) -> None:
        """Save a checkpoint now. Every rank must call this."""
        self._active_session.loop.check_same_call("run.save()")
        self._active_session.loop.save()

    def stop(self) -> None:
        """Stop after this step and save. Every rank must call this."""
        self._active_session.loop.request_stop()

    def generate(self, prompt: Tensor, *, num_tokens: int, **options: Any) -> Tensor:
        """Generate token ids after `prompt`, of shape `[batch, length]`. Every rank must call this.

        Under local SGD, the sites' mean weights are used.
        """
        prompt = prompt.to(self._active_session.world.device)
        forward = partial(self._active_session.setup.step.forward_backward.compute_logits, self.model)
        with self._active_session.loop.synchronized_weights():
            return generate(self.model, prompt, num_tokens=num_tokens, forward=forward, **options)

    @property
    def model(self) -> nn.Module:
        """The user's own module."""
        return self._active_session.setup.model

    @property
    def optimizers(self) -> list[Optimizer]:
        """The job's own optimizers, as its factory made them."""
        return self._active_session.setup.update.optimizers

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self._active_session.run.path

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self._active_session.world.rank

    @property
    def _active_session(self) -> Session:
        if self._session is None:
            raise RuntimeError("use a Run inside `with pl.Run(job) as run:`")
        return self._session

    def _set_threads(self, number: int) -> None:
        """Set torch's thread count until the run ends."""
        self._previous_threads = self._previous_threads or torch.get_num_threads()
        torch.set_num_threads(number)

    def _restore_process_state(self) -> None:
        """Undo this run's changes to the process when the run ends, so that the next run starts as the first did."""
        if self._run_lock is not None:
            self._run_lock.close()
        if self._update_guard is not None:
            self._update_guard.remove()
            self._update_guard = None
        if self._has_signal_handler:
            stop_flag.remove()
        if self._previous_death_signal is not None:
            outlive_launcher(self._previous_death_signal)
        if self._previous_threads:
            torch.set_num_threads(self._previous_threads)
        self._has_signal_handler, self._previous_death_signal, self._previous_threads = False, None, 0

    def _join_or_start(self) -> None:
        """Continue in a worker or a single process; in a plain process with several ranks, start the workers and exit.

        Exact mode restarts the script too, because an environment variable that torch reads at its import chooses the
        kernels.
        """
        if not self._is_in_script:
            return
        folder = attempt_folder(os.environ)
        if folder is not None:
            self._refuse_second_run()
            request = read_json(folder / "request.json")
            payload, self._script_command = request["payload"], ["python", *request["script"]]
            inherited_fields = (*INHERITED_FIELDS, *(AUTO_LAYOUT_FIELDS if self._is_auto_layout else ()))
            self._task = Task.from_json({**self._task.as_json(), **{name: payload[name] for name in inherited_fields}})
            return
        needs_restart = self._exact and not choose_exact_kernels()
        if (launcher := detect_world(os.environ)) is not None:
            if needs_restart:
                restart_in_exact_mode(had_run=Run._has_opened)
            adopt_launcher_variables(launcher, os.environ)
        num_processes = self._task.ranks if self._is_auto_layout else count_processes(self._task)
        runs_here = launcher is not None or (num_processes == 1 and not needs_restart)
        script = [] if runs_here else restart_arguments(ranks=num_processes)
        if not runs_here and not is_main_thread():
            raise _not_in_main_thread(num_processes)
        self._task = with_run_folder(self._task, is_chooser=launcher is None or launcher.rank == 0)
        if self._is_auto_layout:
            self._task = resolve("paceline.measured_planning.auto_worker:plan_script_task")(self._task, job=self.job)
        if runs_here:
            if self._exact or num_processes < self._task.ranks:
                self._set_threads(count_threads(self._task, exact=self._exact))
            configure_malloc(os.environ)
            stop_flag.install(ends_process=False)
            self._has_signal_handler, self._previous_death_signal = (
                True,
                die_with_launcher(os.environ) if launcher else None,
            )
            return
        sys.exit(self._start_ranks(script))

    @staticmethod
    def _refuse_second_run() -> None:
        """Raise an error if this process opens a second `Run`: its run folder and rendezvous serve only one."""
        if Run._has_opened:
            raise UsageError(
                "a second pl.Run in processes that were started for the first one.",
                cause="with several ranks the script restarts from its first line in each rank, for one Run",
                hint="one script for each run, or paceline train; with ranks=1 or under torchrun, a script may have "
                "several runs",
            )

    def _start_ranks(self, script: list[str]) -> int:
        """Start the script in each rank, wait for the end of the run, and return the exit code."""
        folder = Path(self._task.run)
        if Path(START_FOLDER) != Path.cwd():  # the ranks start in the folder in which the script started
            self._task = replace(self._task, run=str(folder.resolve()))
        start_scripts = resolve(
            "paceline.measured_planning.script_launcher:start_scripts"
        )  # imports the planner, which the ranks do not need
        outcome, details = start_scripts(self._task, script, exact=self._exact, job=self.job)
        if outcome.exit_code:
            print_line(
                final_message(outcome, resume_command=self._resume_command(folder), extra_lines=details), sys.stderr
            )
        return int(outcome.exit_code)


def _not_in_main_thread(ranks: int) -> UsageError:
    return UsageError(
        f"pl.Run on {ranks} ranks restarts this script once per rank, but it was not called in the main thread.",
        cause="an app, a sweep or a server called it, and every rank would run that program again from its first line",
        hint='ranks=1 here, or a job in a file: pl.train("job.py", ...), which any thread may call',
    )
