"""Build the training setup of a rank from a job: model, layout, optimizers and step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from paceline.checkpoint.optimizer_options import Options
from paceline.checkpoint.state_outside_state_dict import NonPersistentBuffers
from paceline.comm.mesh_groups import MeshGroups
from paceline.comm.process_group import World
from paceline.comm.rank_threads import ThreadWorld, thread_worlds
from paceline.config.settings import Settings
from paceline.console.output import print_line
from paceline.errors import JobError
from paceline.job import Job
from paceline.parallel.batchnorm.running_statistics import build_state_recorders
from paceline.parallel.batchnorm.sync_batchnorm import synchronize_batchnorms
from paceline.parallel.compression.build_codec import compression_notes
from paceline.parallel.compression.error_feedback_reducer import ErrorFeedbackReducer
from paceline.parallel.data_parallel.exact_reduction import FixedPointGrid
from paceline.parallel.data_parallel.module_buffers import BufferPolicy
from paceline.parallel.data_parallel.thread_replicas import ThreadReplicas, parallelize_thread_replica, shared_gpu
from paceline.parallel.gradients.partition import do_nothing
from paceline.parallel.initialization.pretrained import PretrainedModel
from paceline.parallel.initialization.unsupported_tensors import refuse_tensors
from paceline.parallel.module_access.broadcast_initial import broadcast_initial_tensors
from paceline.parallel.module_access.parameters import NamedParameter, trainable_parameters
from paceline.parallel.module_access.sharded_tensors import ShardedTensors, model_tensors, param_tensors
from paceline.parallel.module_access.user_hooks import hook_notes
from paceline.parallel.parallelize import parallelize
from paceline.parallel.placement import ParallelizedModel, PlacementRequest
from paceline.parallel.sharding.zero_sharded_optimizer import ShardedOptimizerFactory
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.mesh import DATA_AXES, Mesh
from paceline.step.loss.loss_return_value import LossContract
from paceline.step.optimizer_update import OptimizerUpdate
from paceline.step.replica_context import ReplicaContext
from paceline.step.shared_memory.rng_turns import HostRngTurns
from paceline.step.step_rule import StepRequest
from paceline.step.synchronous import SynchronousStep
from paceline.step.update_rules import step_rule
from paceline.torch_internals.private_api import recompile_on_hook_changes
from paceline.torch_internals.rng import RandomStreams, seed_all, stream_key
from paceline.trainer.checks.check_job import check_job
from paceline.trainer.checks.example_batch import ExampleBatch
from paceline.trainer.checks.loss_modules import loss_notes
from paceline.trainer.checks.option_compatibility import (
    check_compatibility,
    refuse_compiled_model,
    unused_placement_notes,
)
from paceline.trainer.checks.parallel_checks import (
    NOT_COMPARED_NOTE,
    build_context_parallel,
    is_model_small,
    try_expert_parallel,
)
from paceline.trainer.setup.initial_model import InitialModel, build_initial_full_model, build_initial_model
from paceline.trainer.setup.job_data import JobData
from paceline.trainer.setup.optimizers import build_optimizer_factory, make_update
from paceline.trainer.train_mode import set_train_mode


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The model, optimizers and step of one rank."""

    job: Job
    settings: Settings
    plan: ExecutionPlan
    worlds: MeshGroups
    site: World
    """The world of the ranks that train one set of weights: under local SGD a site, otherwise all ranks."""
    model: nn.Module
    """The first of `models`."""
    models: Sequence[nn.Module]
    """The replicas of this process."""
    named_parameters: Sequence[NamedParameter]
    """This rank's parameters, or its shards of them."""
    weights: ShardedTensors
    """How the model's parameters and buffers are sharded."""
    optim_shards: ShardedTensors
    """How the parameters in the optimizers are sharded."""
    parallelized_model: ParallelizedModel
    step: SynchronousStep
    grid: FixedPointGrid | None
    """The fixed-point grid of exact mode; None without it."""
    notes: tuple[str, ...]
    initial_options: Options
    """The options of the optimizers before an LR scheduler changed them."""
    nonpersistent_buffers: NonPersistentBuffers
    data: JobData

    @property
    def world(self) -> World:
        """The world of all ranks."""
        return self.worlds.all_ranks

    @property
    def update(self) -> OptimizerUpdate:
        """The optimizer update of this rank."""
        return self.step.replica.update

    def as_evaluated(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the weights to evaluate: the average (EMA), if the job has one."""
        return nullcontext() if self.update.ema is None else self.update.ema.use_averages()

    def check_trainable(self) -> None:
        """Check that the model can be trained in this layout, not only evaluated.

        Raises:
            LayoutError: no gradient flows back through the model.
        """
        if self.parallelized_model.pipeline_model is not None:
            self.parallelized_model.pipeline_model.stages.check_trainable()

    def close(self) -> None:
        """Remove the hooks from the model."""
        self.step.close()
        self.parallelized_model.close()


def job_settings(job: Job) -> dict[str, Any]:
    """Return the settings that a job sets. The config file and the command line override these settings.

    Raises:
        JobError: the job names the run folder, which the command needs before it loads the job.
    """
    values = dict(job.settings or {})
    if "run_dir" in values:
        raise JobError(
            f"Job(settings={{'run_dir': {str(values['run_dir'])!r}}}): a job can't set its run folder.",
            cause="the run folder exists before the job is loaded",
            hint=f"--run-dir {values['run_dir']}, run_dir = ... in the file of --config, or pl.Run(job, run_dir=...)",
        )
    for name in ("micro_batch_size", "max_grad_norm"):
        value = getattr(job, name)
        if value is not None:
            values.setdefault(f"train.{name}", value)
    return values


def build_model(job: Job, *, seed: int) -> nn.Module:
    """Build the model without any layout; its random draws depend only on the seed."""
    recompile_on_hook_changes()
    seed_all(stream_key(seed, "build"))
    try:
        model = job.model()
    except (ValueError, RuntimeError) as error:
        if "process group" not in str(error):
            raise
        raise JobError(
            f"model= failed: {error}",
            cause="DistributedDataParallel or another wrapper inside model=, which Paceline adds itself",
            hint="model= without it; --layout ddp or fsdp",
        ) from error
    if not isinstance(model, nn.Module):
        raise JobError(
            f"model= returned a {type(model).__name__}, expected a torch.nn.Module.", hint="model=lambda: MyModel()"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise JobError(
            "model= returned parameters on the meta device, so they have no initial values.",
            cause='built under torch.device("meta"), to be filled later',
            hint="leave it out: above init.limit a model is built on the meta device automatically, "
            "and its init is replayed",
        )
    refuse_tensors(model)
    return model


def build_training_setup(*, job: Job, settings: Settings, plan: ExecutionPlan, world: World) -> TrainingSetup:
    """Build the models, optimizers and step of one rank.

    Raises:
        JobError, UsageError, Problems: the request is not possible.
    """
    check_compatibility(job, settings, plan)
    rule = step_rule(plan.update_rule)
    plan = rule.plan_for_group(plan, world_size=world.world_size)
    worlds = MeshGroups.from_mesh(world, mesh=plan.mesh) if plan.processes > 1 else MeshGroups.from_replicas(world)
    groups = _replica_mesh_groups(plan, settings, rule.groups(worlds, plan=plan))
    site = groups[0].all_ranks if len(groups) == 1 else world
    initial_models = [_build_initial_model(job, settings, group) for group in groups]
    models = [m.to(group.all_ranks.device) for m, group in zip(initial_models, groups, strict=True)]
    check_job(job, models[0], takes_sparse=rule.traits.accepts_sparse_gradients)
    refuse_compiled_model(models[0], plan)
    named_parameters = [trainable_parameters(model) for model in models]
    notes = [*unused_placement_notes(settings, plan), *initial_models[0].notes, *set_train_mode(models)]
    notes += _broadcast_initial_weights(models[0], world) if initial_models[0].is_whole else []
    notes += [] if world.is_simulated else loss_notes(job.loss, model=models[0], world=world)
    shared_model = rule.share_model(models[0], world=world)
    factory = build_optimizer_factory(job, named_parameters[0], plan=plan, exact=settings.train.exact)
    nonpersistent_buffers, data = NonPersistentBuffers(models[0]), JobData(job, settings)
    contracts = [LossContract(job=job, model=model, probes_model_loss=not world.is_simulated) for model in models]
    if len(groups) > 1:
        parallel_models = _parallelize_threads(models, named_parameters, groups, exact=settings.train.exact)
    else:
        parallel_models = [_parallelize_replica(
            job, settings, plan, initial_models[0], models[0], contracts[0], groups[0], factory, data,
        )]  # fmt: skip
        notes += initial_models[0].deferred_model.notes if initial_models[0].deferred_model is not None else []
        notes += _placement_notes(parallel_models[0], plan, contracts[0], world=worlds.summed)
    threads = ThreadReplicas(models=models, grids=[p.grid for p in parallel_models]) if len(groups) > 1 else None
    update, initial_options = make_update(job, settings, plan, models[0], parallel_models[0], factory, world=site)
    rng_turns = None if threads is None else _build_rng_turns(settings, groups)
    contexts = [
        _build_replica_context(settings, model, group, parallel_model, contract, update, rng_turns)
        for model, group, parallel_model, contract in zip(models, groups, parallel_models, contracts, strict=True)
    ]
    request = StepRequest(
        plan=plan, contexts=contexts, parallelized_model=parallel_models[0], thread_replicas=threads,
        rng_turns=rng_turns, shared_model=shared_model, replica_world=worlds.replicate,
    )  # fmt: skip
    return TrainingSetup(
        job=job, settings=settings, plan=plan, worlds=worlds, site=site, model=models[0], models=models,
        named_parameters=parallel_models[0].named_parameters,
        weights=parallel_models[0].weights
        if threads is None
        else ShardedTensors(world=world, tensors=model_tensors(models[0])),
        optim_shards=parallel_models[0].optim_shards
        if threads is None
        else ShardedTensors(world=world, tensors=param_tensors(named_parameters[0])),
        parallelized_model=parallel_models[0],
        step=rule.make_step(request),
        grid=parallel_models[0].grid,
        notes=tuple(notes),
        initial_options=initial_options,
        nonpersistent_buffers=nonpersistent_buffers,
        data=data,
    )  # fmt: skip


def _parallelize_threads(
    models: Sequence[nn.Module],
    named_parameters: Sequence[Sequence[NamedParameter]],
    replica_groups: Sequence[MeshGroups],
    *,
    exact: bool,
) -> list[ParallelizedModel]:
    """Parallelize the replicas that are threads of this process."""
    return [
        parallelize_thread_replica(
            model, members=parameters, targets=named_parameters[0], world=mesh_groups.all_ranks, exact=exact
        )
        for model, parameters, mesh_groups in zip(models, named_parameters, replica_groups, strict=True)
        if isinstance(mesh_groups.all_ranks, ThreadWorld)
    ]


def full_model_builder(job: Job, settings: Settings) -> Callable[[], nn.Module]:
    """Return a function that builds the full model in one process, with the initial values that every layout has."""
    build = partial(build_model, job, seed=settings.seed)
    return partial(
        build_initial_full_model,
        build,
        seed=settings.seed,
        limit_bytes=settings.init.limit,
        pretrained=_pretrained_source(job),
    )


def _build_initial_model(job: Job, settings: Settings, worlds: MeshGroups) -> InitialModel:
    build = partial(build_model, job, seed=settings.seed)
    limit = settings.init.limit
    return build_initial_model(
        build, seed=settings.seed, limit_bytes=limit, worlds=worlds, pretrained=_pretrained_source(job)
    )


def _pretrained_source(job: Job) -> PretrainedModel | None:
    return job.model if isinstance(job.model, PretrainedModel) else None


def _parallelize_replica(
    job: Job,
    settings: Settings,
    plan: ExecutionPlan,
    initial_model: InitialModel,
    model: nn.Module,
    contract: LossContract,
    worlds: MeshGroups,
    optimizer_factory: ShardedOptimizerFactory | None,
    data: JobData,
) -> ParallelizedModel:
    """Check that the layout can split the model, and parallelize the model. `model` is on this rank's device."""
    exact = settings.train.exact
    full_parameters = (
        list(optimizer_factory.full_tensor_reasons(exact=exact))
        if optimizer_factory is not None and plan.mesh.zero in (1, 2)
        else []
    )
    if not step_rule(plan.update_rule).traits.splits_parameters:
        full_parameters = [member.name for member in trainable_parameters(model)]
    device = worlds.all_ranks.device
    example = ExampleBatch(
        job=job, settings=settings, plan=plan, model=model, contract=contract, device=device, data=data
    )
    has_shards = bool(settings.train.tensor_shards or settings.train.sequence_shards)
    if set(plan.mesh.split_axes) - set(DATA_AXES) or has_shards:
        example.learn_loss() if initial_model.deferred_model is None else initial_model.deferred_model.run_with_values(
            example.learn_loss
        )
    context = build_context_parallel(
        job,
        model=model,
        contract=contract,
        worlds=worlds,
        example=example,
        sequence_shards=settings.train.sequence_shards,
    )
    if plan.mesh.ep > 1 and is_model_small(model) and not worlds.all_ranks.is_simulated:
        try_expert_parallel(model=model, contract=contract, example=example)
    unchecked_axes = [] if is_model_small(model) else [a for a in ("cp", "ep") if plan.mesh.size(a) > 1]
    for note in (NOT_COMPARED_NOTE.format(axis) for axis in unchecked_axes):
        print_line(note) if initial_model.deferred_model is None else initial_model.deferred_model.notes.append(note)
    request = PlacementRequest(
        layout=plan.asked,
        worlds=worlds,
        example_run=example,
        report=print_line,
        settings=settings.place,
        exact=exact,
        tensor_shards=settings.train.tensor_shards,
        is_compiled=settings.train.compile,
        full_tensor_names=full_parameters,
        context_parallel=context,
        deferred_rows=initial_model.deferred_rows,
        deferred_model=initial_model.deferred_model,
        compression=plan.compression,
    )
    return parallelize(model, request)


def _build_replica_context(
    settings: Settings,
    model: nn.Module,
    worlds: MeshGroups,
    parallelized_model: ParallelizedModel,
    contract: LossContract,
    update: OptimizerUpdate,
    rng_turns: HostRngTurns | None,
) -> ReplicaContext:
    """Return the context of one replica."""
    train = settings.train
    sync_bn_sample_weight = synchronize_batchnorms(model, world=worlds.data) if train.buffers == "sync_bn" else None
    streams = RandomStreams(seed=settings.seed)
    streams.attach(model)
    return ReplicaContext(
        model=model,
        worlds=worlds,
        contract=contract,
        reducer=parallelized_model.reducer,
        context_parallel=parallelized_model.context_parallel,
        state_recorders=build_state_recorders(
            model,
            world=worlds.data,
            enabled=train.buffers == "fold",
            exact=train.exact,
            in_order=worlds.mesh.pp == 1,
            is_compiled=train.compile,
            can_wait=_can_forwards_wait(worlds.mesh),
            over_batch=contract.over_batch,
        ),
        buffers=BufferPolicy(model=model, world=worlds.data, policy=train.buffers, exact=train.exact),
        update=update,
        random_streams=streams,
        precision=train.precision,
        exact=train.exact,
        sync_bn_sample_weight=sync_bn_sample_weight,
        rng_turns=rng_turns,
        undo_reduction=parallelized_model.reducer.undo
        if isinstance(parallelized_model.reducer, ErrorFeedbackReducer)
        else do_nothing,
    )


def _build_rng_turns(settings: Settings, replica_groups: Sequence[MeshGroups]) -> HostRngTurns:
    gpu = shared_gpu([mesh_groups.all_ranks.device for mesh_groups in replica_groups])
    return HostRngTurns(timeout_seconds=settings.train.timeout_seconds, gpu=gpu)


def _can_forwards_wait(mesh: Mesh) -> bool:
    """Return True if the replicas' forwards can run one after another.

    They can't with zero 3 or `ep`, because forwards that exchange tensors must run at the same time, nor with pipeline
    stages or local SGD sites.
    """
    gathers_weights = mesh.zero == 3 and mesh.dp_shard > 1
    return not (gathers_weights or mesh.sites) and mesh.pp == mesh.ep == 1


def _replica_mesh_groups(plan: ExecutionPlan, settings: Settings, worlds: MeshGroups) -> list[MeshGroups]:
    """Return the mesh groups of each replica of this process."""
    if plan.processes > 1 or plan.replicas == 1:
        return [worlds]
    timeout = settings.train.timeout_seconds
    thread_groups = thread_worlds(replicas=plan.replicas, world=worlds.all_ranks, timeout_seconds=timeout)
    return [MeshGroups.from_replicas(thread_world) for thread_world in thread_groups]


def _placement_notes(
    parallelized_model: ParallelizedModel, plan: ExecutionPlan, contract: LossContract, *, world: World
) -> list[str]:
    notes = compression_notes(
        plan.compression, parallelized_model.reducer, named_parameters=parallelized_model.named_parameters, world=world
    )
    return [*notes, *hook_notes(parallelized_model.hooked_names, divides_before_backward=contract.has_early_counts)]


def _broadcast_initial_weights(model: nn.Module, world: World) -> list[str]:
    """Send rank 0's initial weights to all ranks, and return a warning if the weights differed between ranks."""
    differing = [name for names in world.gather_json(broadcast_initial_tensors(model, world=world)) for name in names]
    if not differing:
        return []
    return [f"warning: initial weights differed between ranks ({differing[0]}, ...); rank 0's were sent to all"]
