"""Construction of the step that an execution plan requires."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.bytes_sent import Traffic
from paceline.comm.process_group import World
from paceline.errors import LayoutError, PacelineError, raise_all
from paceline.parallel.batchnorm.running_statistics import norms_with_statistics
from paceline.parallel.data_parallel.shared_memory_model import SharedModel
from paceline.parallel.data_parallel.thread_replicas import ThreadReplicas
from paceline.parallel.parallelize import ParallelizedModel
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.pipedream_checks import stash_of
from paceline.step.forward_backward import ForwardBackward
from paceline.step.local_sgd.local_sgd_step import LocalStep
from paceline.step.local_sgd.outer_optimizer import OuterOptimizer
from paceline.step.parameter_server.parameter_server_step import ServerStep
from paceline.step.pipedream.pipedream_step import PipeDreamStep
from paceline.step.pipeline.pipeline_forward_backward import PipelineForwardBackward
from paceline.step.replica_context import StepContext
from paceline.step.shared_memory.hogwild import HogwildStep
from paceline.step.shared_memory.rng_turns import HostRngTurns
from paceline.step.shared_memory.threads_step import ThreadsStep
from paceline.step.synchronous import SynchronousStep
from paceline.trainer.checks.parameter_server_job_checks import refuse_served


def make_step(
    plan: ExecutionPlan,
    parts: Sequence[StepContext],
    placed: ParallelizedModel,
    mirror: ThreadReplicas | None,
    turns: HostRngTurns | None,
    shared: SharedModel | None,
    *,
    replicas: World,
) -> SynchronousStep:
    """Return the step by which this process's replicas turn a batch into an update.

    `replicas` is the world of this rank's counterparts in the other replicas.
    """
    if placed.piped is not None and plan.rule.is_stashed:
        _refuse_stashed(parts[0], placed, placed.piped, plan)
        stash = stash_of(plan.rule, plan.mesh)
        return PipeDreamStep(parts[0], piped=placed.piped, stash=stash, rounds=-(-plan.num_micro // plan.replicas))
    if plan.rule.has_servers:
        refuse_served(parts[0], plan)
        return ServerStep(
            parts[0],
            rule=plan.rule,
            shares=plan.replicas,
            micro_batch_size=plan.micro_batch_size,
            spread=placed.spread,
        )
    if shared is not None:
        return HogwildStep(parts[0], shared=shared)
    passes = None if placed.piped is None else PipelineForwardBackward(parts[0], piped=placed.piped)
    if plan.rule.has_sites:
        return _local(plan, parts[0], placed, passes, replicas)
    if mirror is None or turns is None:
        return SynchronousStep(parts[0], passes=passes)
    return ThreadsStep(parts[0], others=parts[1:], mirror=mirror, turns=turns)


def _local(
    plan: ExecutionPlan, parts: StepContext, placed: ParallelizedModel, passes: ForwardBackward | None, replicas: World
) -> LocalStep:
    sites = OuterOptimizer(
        rule=plan.rule,
        named=placed.named,
        weights=placed.weights,
        peers=replace(replicas, traffic=Traffic()),
        spread=placed.spread,
        wrote=parts.buffers.begin,
    )
    return LocalStep(parts, sites=sites, first=replicas.rank * plan.mesh.dp_shard, passes=passes)


def _refuse_stashed(parts: StepContext, placed: ParallelizedModel, piped: PipelineModel, plan: ExecutionPlan) -> None:
    """Raise if the model has something that pipeline stages with weight stashing cannot support.

    Raises:
        LayoutError, Problems
    """
    found: list[PacelineError] = []
    for name, ranks in sorted(piped.ties.items())[:1]:
        found.append(
            LayoutError(
                f"--update {plan.update}: {name} is used in the stages of ranks {', '.join(map(str, ranks))}.",
                cause="its gradients arrive at different times on each, so its copies would diverge",
                hint="use a model without weights tied over stages, or --update sync",
            )
        )
    for name in placed.hooked[:1]:
        found.append(
            LayoutError(
                f"--update {plan.update} replaces {name} by other weight versions, and the hook on it would "
                "never be called.",
                cause="register_hook or register_post_accumulate_grad_hook on a parameter in model=",
                hint="do the same in loss= or optimizer=, or --update sync",
            )
        )
    names = [name for name, _ in norms_with_statistics(parts.model)]
    if names:
        found.append(
            LayoutError(
                f"--update {plan.update}: {names[0]} keeps running statistics.",
                cause="they would come from microbatches in a different order, on several weight versions",
                hint="LayerNorm or GroupNorm instead, or --update sync",
            )
        )
    raise_all(found)
