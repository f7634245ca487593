"""Checks for what a model or a job has that a parameter server does not support."""

from dataclasses import replace
from typing import Any

from torch.optim import Optimizer

from paceline.console.formatting import plural
from paceline.errors import JobError, LayoutError, PacelineError, raise_all
from paceline.job import Job
from paceline.parallel.batchnorm.running_statistics import norms_with_statistics
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.mesh import Mesh
from paceline.step.parameter_server.model_state import row_tables
from paceline.step.replica_context import StepContext

_TAKE_SPARSE = ("SGD", "SparseAdam", "Adagrad")
_WANT_WHOLE = ("weight_decay", "momentum")  # torch's momentum of sparse rows is sparse, which no checkpoint holds


def among_servers(plan: ExecutionPlan, *, servers: int) -> ExecutionPlan:
    """Return the plan among servers, which divide whole parameters between them. A worker keeps its own plan."""
    if not plan.rule.has_servers:
        return plan
    return replace(plan, mesh=Mesh(dp_shard=servers, zero=1) if servers > 1 else Mesh())


def refuse_served(parts: StepContext, plan: ExecutionPlan) -> None:
    """Raise for what the model has that a parameter server does not support.

    Raises:
        LayoutError, JobError, Problems
    """
    found: list[PacelineError] = []
    names = [name for name, _ in norms_with_statistics(parts.model)]
    if names:
        found.append(
            LayoutError(
                f"--update ps: {names[0]} keeps running statistics.",
                cause="each worker would have its own, but the server, which is saved and evaluated, none",
                hint="LayerNorm or GroupNorm instead, or --update sync",
            )
        )
    tensors = len(trainable_parameters(parts.model))
    if plan.rule.servers > tensors:
        found.append(
            LayoutError(
                f"--update {plan.update}: {plan.rule.servers} servers, "
                f"but the model has {plural(tensors, 'parameter')}.",
                cause="each parameter is whole on one server",
                hint=f"--update ps,servers={max(1, tensors)}",
            )
        )
    raise_all([*found, *_sparse(parts)])


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


def _sparse(parts: StepContext) -> list[PacelineError]:
    """Return errors for optimizers of sparse tables that need whole gradients, since only the read rows are pushed."""
    found: list[PacelineError] = []
    tables, groups = row_tables(parts.model), _groups(parts)
    for member in [member for member in parts.update.named if member.name in tables]:
        optimizer, group = groups.get(id(member.parameter), (None, {}))
        whole = next((f" with {option}" for option in _WANT_WHOLE if group.get(option)), "")
        if optimizer is not None and (type(optimizer).__name__ not in _TAKE_SPARSE or whole):
            kind = f"{type(optimizer).__name__}{whole}"
            found.append(
                JobError(
                    f"{tables[member.name] or 'the table'} gives sparse gradients, but {kind} takes dense ones.",
                    cause="sparse=True pushes only the rows that a share has read",
                    hint="torch.optim.SparseAdam or plain SGD for this table, or sparse=False",
                )
            )
    return found


def _groups(parts: StepContext) -> dict[int, tuple[Optimizer, dict[str, Any]]]:
    """Return each parameter's optimizer and param group on this rank."""
    every = [(optimizer, group) for optimizer in parts.update.optimizers for group in optimizer.param_groups]
    return {id(parameter): (optimizer, group) for optimizer, group in every for parameter in group["params"]}
