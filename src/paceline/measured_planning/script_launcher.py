"""Launch the ranks of a script that opened a `pl.Run`, and restart them with a fallback layout after out-of-memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.config.task import Task
from paceline.config.update_rule import parse_update
from paceline.job import Job
from paceline.launch.launcher import LaunchRequest, start
from paceline.launch.run_outcome import LaunchOutcome
from paceline.measured_planning.auto_layout import make_planning_task, next_fallback_task
from paceline.measured_planning.auto_worker import compute_model_profile
from paceline.measured_planning.oom_advice import advise_after_oom
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.plugins import START_FOLDER
from paceline.reporting.sinks.log_tail import LogTail
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.script_restart import count_processes, count_threads
from paceline.trainer.setup.prepare import prepare


def start_scripts(task: Task, script: list[str], *, exact: bool, job: Job) -> tuple[LaunchOutcome, tuple[str, ...]]:
    """Start the ranks and wait for them. Start them again with a fallback layout after out-of-memory.

    Return the last outcome. If no fallback was left after out-of-memory, also return lines of advice.
    """
    outcome = _start_ranks(task, script, exact=exact)
    while (fallback := next_fallback_task(task, outcome.failure)) is not None:
        task = fallback
        outcome = _start_ranks(task, script, exact=exact)
    return outcome, _oom_advice_lines(task, outcome, job)


def _oom_advice_lines(task: Task, outcome: LaunchOutcome, job: Job) -> tuple[str, ...]:
    """Return lines of advice on layouts that need less memory; empty unless memory ran out."""
    failure = outcome.failure
    if failure is None or not failure.is_short_of_memory:
        return ()

    def profile_model(task: Task) -> Mapping[str, Any]:
        return compute_model_profile(prepare(make_planning_task(task), job=job), max_ranks=task.ranks)

    def python_line(fallback: LayoutForecast) -> str:
        settings = {name: int(value) if value.isdigit() else value for name, value in fallback.settings.items()}
        return f"pl.Run(..., layout={fallback.layout!r}, settings={settings})"

    return advise_after_oom(task, failure, profile_model=profile_model, command_for=python_line).lines


def _start_ranks(task: Task, script: list[str], *, exact: bool) -> LaunchOutcome:
    tails: list[LogTail] = []

    def follow_logs(folder: Path) -> LogTail:
        for tail in tails[-1:]:
            tail.close()
        tails.append(LogTail(folder))
        return tails[-1]

    request = LaunchRequest(
        ranks=count_processes(task),
        run=RunFolder(Path(task.run)),
        script=script,
        working_folder=START_FOLDER,
        payload=task.as_json(),
        threads=count_threads(task, exact=exact),
        exact=exact,
        servers=parse_update(task.update).servers,
    )
    outcome = start(request, on_start=follow_logs)
    tails[-1].close()
    return outcome
