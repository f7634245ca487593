"""A script that opened a `pl.Run` of several ranks, started as those ranks, and once more where memory was short."""

from pathlib import Path

from paceline.plan.machine import usable_cores
from paceline.plan.settle import Cluster, settle_threads
from paceline.spec.layout import parse_layout
from paceline.spec.task import Task
from paceline.spec.update import parse_update
from paceline.start import Outcome, Request, start
from paceline.store.runs import RunFolder
from paceline.train.auto import fallen_back
from paceline.watch.console import Tail

CROSSING = ("run", "attempt", "resume")  # of the task, from the script that starts the ranks to these
CHOSEN = ("layout", "settings", "origins", "options")  # where the layout is auto


def processes_of(task: Task) -> int:
    """How many make its ranks."""
    return parse_layout(task.layout).processes(ranks=task.ranks)


def threads_of(task: Task, *, exact: bool) -> int:
    """Of one rank."""
    cluster = Cluster(ranks=task.ranks, cores=usable_cores())
    return settle_threads(cluster=cluster, one=exact, asked=task.settings.get("train.threads"))


def start_scripts(task: Task, script: list[str], *, exact: bool) -> Outcome:
    """Start them and wait; how the last attempt ended."""
    outcome = _started(task, script, exact=exact)
    while (then := fallen_back(task, outcome.failure)) is not None:
        task = then
        outcome = _started(task, script, exact=exact)
    return outcome


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
        payload=task.as_json(),
        threads=threads_of(task, exact=exact),
        exact=exact,
        servers=parse_update(task.update).servers,
    )
    outcome = start(request, on_start=follow)
    tails[-1].close()
    return outcome
