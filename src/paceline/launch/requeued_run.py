"""The run of a scheduler's job: a job that is started again finds the run that it began before.

After a preemption or a lost process, Slurm runs the same script again, and torchrun the same command. Neither knows the
name of the run folder that the first start created. So a new run records the job and the number of its start, and a
later start of the same job continues this run instead of creating another one. If a script trains one job file several
times with the same settings, its runs are found again in the order in which they were created.
"""

import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from paceline.filesystem.atomic_files import read_json, write_json
from paceline.filesystem.run_lock import process_start_time
from paceline.launch.inherited_environment import own_environ
from paceline.run_folder.run_folder import ROOT, RunFolder, new_run, runs_of_job

RECORD = "scheduler.json"


@dataclass(frozen=True, kw_only=True)
class SchedulerJob:
    """A job that `scheduler` may start several times. `start_number` counts its starts from 1."""

    scheduler: str
    job_id: str
    start_number: int

    def continues(self, earlier: "SchedulerJob") -> bool:
        """Return whether this is a later start of the same job."""
        is_same_job = (self.scheduler, self.job_id) == (earlier.scheduler, earlier.job_id)
        return is_same_job and self.start_number > earlier.start_number


@dataclass(frozen=True, kw_only=True)
class _Record:
    """The record of a run: the jobs that ran it, and what their command asked for."""

    jobs: tuple[SchedulerJob, ...] = ()
    request: dict[str, Any] = field(default_factory=dict)


def detect_scheduler_jobs(environ: Mapping[str, str], *, launcher_id: str) -> tuple[SchedulerJob, ...]:
    """Return the jobs to which this process belongs, the innermost first: torchrun's, then Slurm's.

    `launcher_id` identifies the process that started this one, such as the agent of torchrun.
    """
    jobs = []
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id:
        job_id = f"{run_id}/{launcher_id}"  # several torchruns may share an id
        start_number = 1 + _count(environ.get("TORCHELASTIC_RESTART_COUNT"))
        jobs.append(SchedulerJob(scheduler="torchrun", job_id=job_id, start_number=start_number))
    slurm_id = environ.get("SLURM_JOB_ID", "")
    if slurm_id:
        start_number = 1 + _count(environ.get("SLURM_RESTART_COUNT"))
        jobs.append(SchedulerJob(scheduler="slurm", job_id=slurm_id, start_number=start_number))
    return tuple(jobs)


def current_scheduler_jobs(environ: Mapping[str, str]) -> tuple[SchedulerJob, ...]:
    """Return the jobs to which this process belongs; variables that were set for another process are ignored."""
    parent = os.getppid()
    return detect_scheduler_jobs(own_environ(environ), launcher_id=f"{parent}-{process_start_time(parent)}")


def _count(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0


def find_or_create_run(
    name: str, jobs: Sequence[SchedulerJob], *, request: Mapping[str, Any], root: Path = ROOT
) -> RunFolder:
    """Return the run that one of these jobs began in an earlier start and has not continued yet, or else a new run.

    `request` is what the command asks for, such as its settings. A run is continued only by a command that asks for the
    same.

    Raises:
        UsageError: the folder of a new run can't be created.
    """
    if not jobs:
        return new_run(name, root=root)
    with _claim_lock(root / name):
        run = _find_run(name, jobs, request, root=root) or new_run(name, root=root)
        with suppress(OSError):  # without a record, a later start begins a new run
            write_json(run.path / RECORD, {"jobs": [asdict(job) for job in jobs], "request": dict(request)})
    return run


@contextmanager
def _claim_lock(folder: Path) -> Iterator[None]:
    """Return a context in which no other command chooses a run of the same job, if the disk has locks."""
    with ExitStack() as stack:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _find_run(name: str, jobs: Sequence[SchedulerJob], request: Mapping[str, Any], *, root: Path) -> RunFolder | None:
    records = [(run, _read_record(run)) for run in runs_of_job(name, root=root)]
    for job in jobs:
        for run, record in records:
            if record.request == request and any(job.continues(recorded) for recorded in record.jobs):
                return run
    return None


def _read_record(run: RunFolder) -> _Record:
    try:
        return msgspec.convert(read_json(run.path / RECORD), _Record)
    except (OSError, ValueError):
        return _Record()
