"""The run of a scheduler's job: a job that is started again finds the run that it began before.

After a preemption or a lost process, Slurm runs the same script again, and torchrun the same command. Neither knows the
name of the run folder that the first start created. So a new run records the job and the number of its start, and a
later start of the same job continues this run instead of creating another one. If a script trains one job file several
times, its runs are found again in the order in which they were created.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from paceline.filesystem.atomic_files import read_json, write_json
from paceline.filesystem.run_lock import process_start_time
from paceline.launch.inherited_environment import own_environ
from paceline.run_folder.run_folder import ROOT, RunFolder, new_run, runs_of_job

RECORD = "scheduler.json"
_STATIC_ID = "none"  # torchrun's id of a static rendezvous, which all such jobs share


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


def detect_scheduler_jobs(environ: Mapping[str, str], *, launcher_id: str) -> tuple[SchedulerJob, ...]:
    """Return the jobs to which this process belongs, the innermost first: torchrun's, then Slurm's.

    `launcher_id` identifies the process that started this one. It names a torchrun job without an id of its own.
    """
    jobs = []
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    if run_id:
        job_id = launcher_id if run_id == _STATIC_ID else run_id
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


def find_or_create_run(name: str, jobs: Sequence[SchedulerJob], *, root: Path = ROOT) -> RunFolder:
    """Return the run that one of these jobs began in an earlier start and has not continued yet, or else a new run.

    Raises:
        UsageError: the folder of a new run can't be created.
    """
    run = _find_run(name, jobs, root=root) or new_run(name, root=root)
    if jobs:
        write_json(run.path / RECORD, [asdict(job) for job in jobs])
    return run


def _find_run(name: str, jobs: Sequence[SchedulerJob], *, root: Path) -> RunFolder | None:
    runs = [(run, _read_record(run)) for run in runs_of_job(name, root=root)] if jobs else []
    for job in jobs:
        for run, recorded_jobs in runs:
            if any(job.continues(recorded) for recorded in recorded_jobs):
                return run
    return None


def _read_record(run: RunFolder) -> list[SchedulerJob]:
    try:
        return msgspec.convert(read_json(run.path / RECORD), list[SchedulerJob])
    except (OSError, ValueError):
        return []
