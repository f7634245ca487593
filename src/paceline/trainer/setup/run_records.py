"""The records of a run: the files of the run folder that say how this attempt was set up."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from paceline.config.merge_settings import as_toml
from paceline.config.secret_settings import holds_secret
from paceline.filesystem.atomic_files import read_json, write_json, write_text
from paceline.planner.search.layout_with_forecast import LayoutForecast
from paceline.profiling.environment import environment, loaded_modules
from paceline.run_folder.plan_file import write_plan_file
from paceline.run_folder.run_folder import RunFolder
from paceline.trainer.checks.evaluation_checks import job_choices
from paceline.trainer.setup.prepare import PreparedJob


def write_run_records(run: RunFolder, prepared_job: PreparedJob, *, forecast: LayoutForecast | None) -> None:
    """Write the settings, the plan, the environment and the task of this attempt. Only rank 0 calls this."""
    task = prepared_job.task
    private = holds_secret(prepared_job.requested.values)
    write_text(run.path / "config.toml", as_toml(prepared_job.requested), private=private)
    write_json(run.path / "job.json", job_choices(prepared_job.job))
    write_plan_file(run.path, {**prepared_job.plan.as_json(), **_plan_extras(prepared_job, forecast)})
    if task.restart is None:  # a restart by the same command has the same environment
        write_json(run.path / "env.json", environment(task.job))
    # without what ends with the command
    lasting_task = replace(task, job_handle=None, restart=None, memory_folder="", peer_plan=None)
    write_json(run.task, lasting_task.as_json(), private=private)


def record_new_modules(run: RunFolder) -> None:
    """Record modules in `env.json` that the job's loss or model imported only after the start."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        env = read_json(run.path / "env.json")
        recorded_modules = env["job"]["modules"]
        new_modules = {name: digest for name, digest in loaded_modules().items() if name not in recorded_modules}
        if new_modules:
            write_json(run.path / "env.json", {**env, "job": {**env["job"], "late_modules": new_modules}})


def _plan_extras(prepared_job: PreparedJob, forecast: LayoutForecast | None) -> dict[str, Any]:
    """Return what `plan.json` records in addition to the plan."""
    extras = {"auto": prepared_job.task.options.get("auto"), "forecast": forecast and forecast.as_json()}
    return {name: value for name, value in extras.items() if value is not None}
