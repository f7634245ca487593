"""A script that opened a `pl.Run` of several ranks, started as those ranks, and once more where memory was short."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.job import Job
from paceline.plan.rung import Rung
from paceline.plugins import START_FOLDER
from paceline.spec.task import Task
from paceline.spec.update import parse_update
from paceline.start import Outcome, Request, start
from paceline.store.runs import RunFolder
from paceline.train.auto import fallen_back, to_plan
from paceline.train.auto_run import learnt_here
from paceline.train.cheaper import cheaper
from paceline.train.crossing import processes_of, threads_of
from paceline.train.ready import prepare
from paceline.watch.console import Tail


def start_scripts(task: Task, script: list[str], *, exact: bool, job: Job) -> tuple[Outcome, tuple[str, ...]]:
    """Start them and wait; how the last attempt ended and, where memory was short, what would need less."""
    outcome = _started(task, script, exact=exact)
    while (then := fallen_back(task, outcome.failure)) is not None:
        task = then
        outcome = _started(task, script, exact=exact)
    return outcome, _needing_less(task, outcome, job)


def _needing_less(task: Task, outcome: Outcome, job: Job) -> tuple[str, ...]:
    """As words for the `pl.Run`."""
    failure = outcome.failure
    if failure is None or not failure.is_short_of_memory:
        return ()

    def learn(task: Task) -> Mapping[str, Any]:
        return learnt_here(prepare(to_plan(task), job=job), most_ranks=task.ranks)

    def typed(rung: Rung) -> str:
        settings = {name: int(value) if value.isdigit() else value for name, value in rung.settings.items()}
        return f"pl.Run(..., layout={rung.layout!r}, settings={settings})"

    return cheaper(task, failure, learn=learn, typed=typed).lines


def _started(task: Task, script: list[str], *, exact: bool) -> Outcome:
    tails: list[Tail] = []

    def follow(folder: Path) -> Tail:
        for tail in tails[-1:]:
            tail.close()
        tails.append(Tail(folder))
        return tails[-1]

    request = Request(
        ranks=processes_of(task),
        run=RunFolder(Path(task.run)),
        script=script,
        begins_in=START_FOLDER,
        payload=task.as_json(),
        threads=threads_of(task, exact=exact),
        exact=exact,
        servers=parse_update(task.update).servers,
    )
    outcome = start(request, on_start=follow)
    tails[-1].close()
    return outcome
