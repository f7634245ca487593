"""The rule of a parameter server: workers push gradients, servers hold the weights."""

from dataclasses import replace
from typing import Any

from torch.optim import Optimizer
from typing_extensions import override

from paceline.comm.process_group import LaunchInfo, WorkerEndpoint, World
from paceline.config.settings import Settings
from paceline.config.update_rule import UpdateRule
from paceline.console.formatting import plural
from paceline.errors import JobError, LayoutError, PacelineError, UsageError, raise_all
from paceline.job import Job
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.parallel.module_access.parameters import trainable_parameters
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.mesh import Mesh
from paceline.step.parameter_server.parameter_server_step import ServerStep
from paceline.step.parameter_server.served_tensors import sparse_tables
from paceline.step.parameter_server.transport import open_store
from paceline.step.replica_context import ReplicaContext
from paceline.step.step_rule import RuleTraits, StepRequest, StepRule
from paceline.step.synchronous import SynchronousStep

_SPARSE_OPTIMIZERS = ("SGD", "SparseAdam", "Adagrad")
# Options that need dense gradients. Under sparse gradients, SGD's momentum is sparse, and a checkpoint can't save it.
_DENSE_OPTIONS = ("weight_decay", "momentum")


class ParameterServerRule(StepRule):
    """The rule of `--update ps`, as the servers follow it. Each worker is a separate process."""

    traits = RuleTraits(
        reads_samples=False,
        accepts_sparse_gradients=True,
        splits_parameters=False,
        sends_updates=False,
        verify_mode="replayed",
    )

    @override
    def refuse_job(self, job: Job, settings: Settings, plan: ExecutionPlan) -> list[PacelineError]:
        """Return an error for each feature of the job that a parameter server does not support."""
        errors: list[PacelineError] = []
        if job.loss_over == "batch":
            errors.append(
                JobError(
                    'loss_over="batch" with --update ps: no worker ever has the whole batch.',
                    cause="workers don't wait for each other's outputs",
                    hint="--update sync",
                )
            )
        if job.ema is not None and plan.update_rule.staleness:
            errors.append(
                JobError(
                    f"ema= with --update {plan.update}: it would be updated once per share, at an uncontrolled rate.",
                    cause="its decay is meant for one update per batch",
                    hint="ema=None, or --update ps,staleness=0",
                )
            )
        elif job.ema is not None and plan.update_rule.servers > 1:
            errors.append(
                JobError(
                    "ema= with several servers: no server has all weights after an update.",
                    cause="servers synchronise only at saves and evaluations",
                    hint="ema=None, or --update ps,servers=1,staleness=0",
                )
            )
        if settings.train.on_empty != "stop":
            errors.append(
                UsageError(
                    "--train.on_empty zero with --update ps is not supported.",
                    cause="with staleness, a server updates before it knows the counts of the whole batch",
                    hint="--update sync, or --train.on_empty stop",
                )
            )
        return errors

    @override
    def is_gradient_worker(self, update: UpdateRule, *, rank: int) -> bool:
        """Return True for all ranks after the servers."""
        return rank >= update.servers

    @override
    def join(self, plan: ExecutionPlan, *, launch_info: LaunchInfo, timeout_seconds: float) -> World:
        """Join the other servers. If there is only one server, open the rendezvous store instead.

        Workers connect later, at the `worker_endpoint` of the returned world.
        """
        servers, worker_endpoint = plan.update_rule.servers, WorkerEndpoint(launch_info=launch_info)
        if servers == 1:
            store = open_store(launch_info, timeout_seconds=timeout_seconds)
            return World(timeout_seconds=timeout_seconds, worker_endpoint=worker_endpoint, store=store)
        servers_info = replace(launch_info, world_size=servers)
        world = World.join(launch_info=servers_info, device_type="cpu", backend="gloo", timeout_seconds=timeout_seconds)
        return replace(world, worker_endpoint=worker_endpoint)

    @override
    def plan_for_group(self, plan: ExecutionPlan, *, world_size: int) -> ExecutionPlan:
        """Return the plan of the servers, each of which owns some of the parameters. A worker keeps its own plan."""
        return replace(plan, mesh=Mesh(dp_shard=world_size, zero=1) if world_size > 1 else Mesh())

    @override
    def make_step(self, request: StepRequest) -> SynchronousStep:
        """Return a server's step."""
        plan, replica = request.plan, request.contexts[0]
        refuse_unsupported_model(replica, plan)
        return ServerStep(
            replica,
            rule=plan.update_rule,
            num_shares=plan.replicas,
            micro_batch_size=plan.micro_batch_size,
            sync_after_update=request.parallelized_model.sync_after_update,
        )

    @override
    def identity(self, plan: ExecutionPlan, pipeline_model: PipelineModel | None) -> str:
        """Return the rule with one server, since the saved state does not depend on the number of servers."""
        return str(replace(plan.update_rule, servers=1))


def refuse_unsupported_model(replica: ReplicaContext, plan: ExecutionPlan) -> None:
    """Raise an error for each feature of the model that a parameter server does not support.

    Raises:
        LayoutError, JobError, Problems
    """
    errors: list[PacelineError] = []
    names = [name for name, _ in norms_with_statistics(replica.model)]
    if names:
        errors.append(
            LayoutError(
                f"--update ps: {names[0]} keeps running statistics.",
                cause="each worker would have its own, and the server, which is evaluated and saved, would have none",
                hint="LayerNorm or GroupNorm instead, or --update sync",
            )
        )
    num_parameters = len(trainable_parameters(replica.model))
    if plan.update_rule.servers > num_parameters:
        errors.append(
            LayoutError(
                f"--update {plan.update}: {plan.update_rule.servers} servers, "
                f"but the model has {plural(num_parameters, 'parameter')}.",
                cause="each parameter is stored on one server, as a whole tensor",
                hint=f"--update ps,servers={max(1, num_parameters)}",
            )
        )
    raise_all([*errors, *_refuse_sparse_tables(replica)])


def _refuse_sparse_tables(replica: ReplicaContext) -> list[PacelineError]:
    """Return an error for each sparse table whose optimizer needs dense gradients.

    Workers push only the rows of a sparse table that they have read.
    """
    errors: list[PacelineError] = []
    tables, groups = sparse_tables(replica.model), _optimizer_groups(replica)
    for member in [member for member in replica.update.named_parameters if member.name in tables]:
        optimizer, group = groups.get(id(member.parameter), (None, {}))
        dense_option = next((f" with {option}" for option in _DENSE_OPTIONS if group.get(option)), "")
        if optimizer is not None and (type(optimizer).__name__ not in _SPARSE_OPTIMIZERS or dense_option):
            description = f"{type(optimizer).__name__}{dense_option}"
            errors.append(
                JobError(
                    f"{tables[member.name] or 'the table'} gives sparse gradients, but {description} takes dense ones.",
                    cause="sparse=True pushes only the rows that a share has read",
                    hint="torch.optim.SparseAdam or plain SGD for this table, or sparse=False",
                )
            )
    return errors


def _optimizer_groups(replica: ReplicaContext) -> dict[int, tuple[Optimizer, dict[str, Any]]]:
    """Return each parameter's optimizer and param group on this rank."""
    pairs = [(optimizer, group) for optimizer in replica.update.optimizers for group in optimizer.param_groups]
    return {id(parameter): (optimizer, group) for optimizer, group in pairs for parameter in group["params"]}
