"""From a script that opened a `pl.Run` to the ranks that it starts: what of its task they take over."""

from paceline.plan.machine import usable_cores
from paceline.plan.settle import Cluster, settle_threads
from paceline.spec.layout import parse_layout
from paceline.spec.task import Task

CROSSING = ("run", "attempt", "resume")  # of the task, from the script that starts the ranks to these
CHOSEN = ("layout", "settings", "origins", "options")  # where the layout is auto


def processes_of(task: Task) -> int:
    """How many make its ranks."""
    return parse_layout(task.layout).processes(ranks=task.ranks)


def threads_of(task: Task, *, exact: bool) -> int:
    """Of one rank."""
    cluster = Cluster(ranks=task.ranks, cores=usable_cores())
    return settle_threads(cluster=cluster, one=exact, asked=task.settings.get("train.threads"))
