"""Checks for what a model or a job has that a parameter server does not support."""

from dataclasses import replace

from paceline.errors import JobError, PacelineError
from paceline.job import Job
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.mesh import Mesh

_TAKE_SPARSE = ("SGD", "SparseAdam", "Adagrad")
_WANT_WHOLE = ("weight_decay", "momentum")  # torch's momentum of sparse rows is sparse, which no checkpoint holds


def among_servers(plan: ExecutionPlan, *, servers: int) -> ExecutionPlan:
    """Return the plan among servers, which divide whole parameters between them. A worker keeps its own plan."""
    if not plan.rule.has_servers:
        return plan
    return replace(plan, mesh=Mesh(dp_shard=servers, zero=1) if servers > 1 else Mesh())


def refuse_job(job: Job, plan: ExecutionPlan) -> list[PacelineError]:
    """Return errors for what the job asks for that a parameter server does not support."""
    if not plan.rule.has_servers:
        return []
    found: list[PacelineError] = []
    if job.loss_over == "batch":
        found.append(
            JobError(
                'loss_over="batch" with --update ps: no worker ever has the whole batch.',
                cause="workers don't wait for each other's outputs",
                hint="--update sync",
            )
        )
    if job.ema is not None and plan.rule.staleness:
        found.append(
            JobError(
                f"ema= with --update {plan.update}: it would be updated once per share, at an uncontrolled rate.",
                cause="its decay is meant for one update per batch",
                hint="ema=None, or --update ps,staleness=0",
            )
        )
    elif job.ema is not None and plan.rule.servers > 1:
        found.append(
            JobError(
                "ema= with several servers: none has all weights after an update.",
                cause="they synchronise only at saves and evaluations",
                hint="ema=None, or --update ps,servers=1,staleness=0",
            )
        )
    return found
