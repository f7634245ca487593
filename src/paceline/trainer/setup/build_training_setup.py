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
from paceline.parallel.batchnorm.running_statistics import build_tapes
from paceline.parallel.batchnorm.sync_batchnorm import synchronize_batchnorms
from paceline.parallel.compression.build_codec import compression_notes
from paceline.parallel.compression.error_feedback_reducer import ErrorFeedbackReducer
from paceline.parallel.data_parallel.exact_reduction import FixedPointGrid
from paceline.parallel.data_parallel.module_buffers import BufferPolicy
from paceline.parallel.data_parallel.thread_replicas import ThreadReplicas, shared_gpu
from paceline.parallel.gradients.partition import do_nothing
from paceline.parallel.initialization.pretrained import PretrainedModel
from paceline.parallel.initialization.unsupported_tensors import refuse_tensors
from paceline.parallel.module_access.broadcast_initial import broadcast_initial_tensors
from paceline.parallel.module_access.parameters import NamedParameter, trainable_parameters
from paceline.parallel.module_access.sharded_tensors import ShardedTensors, model_tensors, param_tensors
from paceline.parallel.module_access.user_hooks import hook_notes
from paceline.parallel.parallelize import parallelize, parallelize_thread_replica
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
from paceline.torch_internals.private_api import guard_hooks
from paceline.torch_internals.rng import RandomStreams, seed_all, stream_key
from paceline.trainer.checks.check_job import check_job
from paceline.trainer.checks.example_batch import ExampleBatch
from paceline.trainer.checks.loss_modules import loss_notes
from paceline.trainer.checks.option_compatibility import check_compatibility, refuse_foreign, unheard_placing
from paceline.trainer.checks.parallel_checks import UNTRIED, can_be_tried, context_of, try_experts
from paceline.trainer.setup.initial_model import InitialModel, begin_whole, build_initial_model
from paceline.trainer.setup.job_data import JobData
from paceline.trainer.setup.optimizers import learn_rules, make_update
from paceline.trainer.train_mode import set_train_mode


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The model, optimizers and step of one rank. `models` are this process's replicas; `model` is the first of them.

    `site` is the world of the ranks that share one set of weights: all ranks, unless sites train separately.
    `weights` are the shards of parameters and buffers in the models, `optimizer_tensors` those of the parameters in
    the optimizers. `named_parameters` are this rank's parameters, or its shards of them. `initial_options` are the
    optimizers' options before a schedule changed them.
    """

    job: Job
    settings: Settings
    plan: ExecutionPlan
    worlds: MeshGroups
    site: World
    model: nn.Module
    models: Sequence[nn.Module]
    named: Sequence[NamedParameter]
    weights: ShardedTensors
    kept: ShardedTensors
    placed: ParallelizedModel
    step: SynchronousStep
    grid: FixedPointGrid | None
    notes: tuple[str, ...]
    given: Options
    unlisted: NonPersistentBuffers
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
        """Return a context with the weights that metrics use: the average, if the job has one."""
        return nullcontext() if self.update.ema is None else self.update.ema.use_averages()

    def refuse_training(self) -> None:
        """Raise before the first step if the model can only be evaluated in this layout.

        Raises:
            LayoutError: no gradient flows back through the model.
        """
        if self.placed.pipeline_model is not None:
            self.placed.pipeline_model.stages.refuse_training()

    def close(self) -> None:
        """Remove the hooks from the model."""
        self.step.close()
        self.placed.close()


def job_settings(job: Job) -> dict[str, Any]:
    """Return the settings that a job sets; the config file and the command line override them.

    Raises:
        JobError: the job names the run folder, which the command needs before it loads the job.
    """
    layer = dict(job.settings or {})
    if "run_dir" in layer:
        raise JobError(
            f"Job(settings={{'run_dir': {str(layer['run_dir'])!r}}}): a job can't set its run folder.",
            cause="the run folder exists before the job is loaded",
            hint=f"--run-dir {layer['run_dir']}, run_dir = ... in the file of --config, or pl.Run(job, run_dir=...)",
        )
    for name in ("micro_batch_size", "max_grad_norm"):
        value = getattr(job, name)
        if value is not None:
            layer.setdefault(f"train.{name}", value)
    return layer


def build_model(job: Job, *, seed: int) -> nn.Module:
    """Build the model without any layout; its random draws depend only on the seed."""
    guard_hooks()
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
    own = _own(plan, settings, rule.groups(worlds, plan=plan))
    site = own[0].all_ranks if len(own) == 1 else world
    begun = [_begun(job, settings, each) for each in own]
    models = [one.on(each.all_ranks.device) for one, each in zip(begun, own, strict=True)]
    check_job(job, models[0], takes_sparse=rule.traits.accepts_sparse_gradients)
    refuse_foreign(models[0], plan)
    named = [trainable_parameters(model) for model in models]
    notes = [*unheard_placing(settings.place, plan), *begun[0].notes, *set_train_mode(models)]
    notes += _equal_start(models[0], world) if begun[0].is_whole else []
    notes += [] if world.is_simulated else loss_notes(job.loss, model=models[0], world=world)
    shared = rule.share_model(models[0], world=world)
    rules = learn_rules(job, named[0], plan=plan, exact=settings.train.exact)
    unlisted, data = NonPersistentBuffers(models[0]), JobData(job, settings)
    contracts = [LossContract(job=job, model=model, probes_model_loss=not world.is_simulated) for model in models]
    if len(own) > 1:
        placed = _placed_threads(models, named, own, exact=settings.train.exact)
    else:
        placed = [_placed(job, settings, plan, begun[0], models[0], contracts[0], own[0], rules, data)]
        notes += begun[0].late.notes if begun[0].late is not None else []
        notes += _notes_of_placement(placed[0], plan, contracts[0], world=worlds.summed)
    mirror = ThreadReplicas(models=models, grids=[one.grid for one in placed]) if len(own) > 1 else None
    update, given = make_update(job, settings, plan, models[0], placed[0], rules, world=site)
    turns = None if mirror is None else _turns(settings, own)
    contexts = [
        _context(settings, model, each, one, contract, update, turns)
        for model, each, one, contract in zip(models, own, placed, contracts, strict=True)
    ]
    request = StepRequest(
        plan=plan, contexts=contexts, parallelized_model=placed[0], thread_replicas=mirror, rng_turns=turns,
        shared_model=shared, replica_world=worlds.replicate,
    )  # fmt: skip
    return TrainingSetup(
        job=job,
        settings=settings,
        plan=plan,
        worlds=worlds,
        site=site,
        model=models[0],
        models=models,
        named=placed[0].named_parameters,
        weights=placed[0].weights if mirror is None else ShardedTensors(world=world, tensors=model_tensors(models[0])),
        kept=placed[0].optim_shards if mirror is None else ShardedTensors(world=world, tensors=param_tensors(named[0])),
        placed=placed[0],
        step=rule.make_step(request),
        grid=placed[0].grid,
        notes=tuple(notes),
        given=given,
        unlisted=unlisted,
        data=data,
    )


def _placed_threads(
    models: Sequence[nn.Module],
    named: Sequence[Sequence[NamedParameter]],
    own: Sequence[MeshGroups],
    *,
    exact: bool,
) -> list[ParallelizedModel]:
    """Parallelize the replicas that are threads of this process."""
    return [
        parallelize_thread_replica(model, members=members, targets=named[0], world=each.all_ranks, exact=exact)
        for model, members, each in zip(models, named, own, strict=True)
        if isinstance(each.all_ranks, ThreadWorld)
    ]


def begun_whole(job: Job, settings: Settings) -> Callable[[], nn.Module]:
    """Return a function that builds the full model in one process, with the initial values that every layout has."""
    plain = partial(build_model, job, seed=settings.seed)
    return partial(begin_whole, plain, seed=settings.seed, limit_bytes=settings.init.limit, stored=_stored(job))


def _begun(job: Job, settings: Settings, worlds: MeshGroups) -> InitialModel:
    plain = partial(build_model, job, seed=settings.seed)
    limit = settings.init.limit
    return build_initial_model(plain, seed=settings.seed, limit_bytes=limit, worlds=worlds, stored=_stored(job))


def _stored(job: Job) -> PretrainedModel | None:
    return job.model if isinstance(job.model, PretrainedModel) else None


def _placed(
    job: Job,
    settings: Settings,
    plan: ExecutionPlan,
    begun: InitialModel,
    model: nn.Module,
    contract: LossContract,
    worlds: MeshGroups,
    rules: ShardedOptimizerFactory | None,
    data: JobData,
) -> ParallelizedModel:
    exact = settings.train.exact
    whole = list(rules.full_tensor_reasons(exact=exact)) if rules is not None and plan.mesh.zero in (1, 2) else []
    if not step_rule(plan.update_rule).traits.splits_parameters:
        whole = [member.name for member in trainable_parameters(model)]
    device = worlds.all_ranks.device
    example = ExampleBatch(
        job=job, settings=settings, plan=plan, model=model, contract=contract, device=device, data=data
    )
    if set(plan.mesh.split_axes) - set(DATA_AXES):
        example.learn() if begun.late is None else begun.late.run_with_values(example.learn)
    context = context_of(job, model=model, contract=contract, worlds=worlds, example=example)
    if plan.mesh.ep > 1 and can_be_tried(model) and not worlds.all_ranks.is_simulated:
        try_experts(model=model, contract=contract, example=example)
    untried = [] if can_be_tried(model) else [a for a in ("cp", "ep") if plan.mesh.size(a) > 1]
    for note in (UNTRIED.format(axis) for axis in untried):
        print_line(note) if begun.late is None else begun.late.notes.append(note)
    request = PlacementRequest(
        layout=plan.asked,
        worlds=worlds,
        example_run=example,
        report=print_line,
        settings=settings.place,
        exact=exact,
        is_compiled=settings.train.compile,
        full_tensor_names=whole,
        context_parallel=context,
        deferred_rows=begun.rows,
        deferred_model=begun.late,
        compression=plan.compression,
    )
    return parallelize(model, request)


def _context(
    settings: Settings,
    model: nn.Module,
    worlds: MeshGroups,
    placed: ParallelizedModel,
    contract: LossContract,
    update: OptimizerUpdate,
    turns: HostRngTurns | None,
) -> ReplicaContext:
    """Return the context of one replica."""
    train = settings.train
    rounds = synchronize_batchnorms(model, world=worlds.data) if train.buffers == "sync_bn" else None
    streams = RandomStreams(seed=settings.seed)
    streams.attach(model)
    return ReplicaContext(
        model=model,
        worlds=worlds,
        contract=contract,
        reducer=placed.reducer,
        context_parallel=placed.context_parallel,
        state_recorders=build_tapes(
            model,
            world=worlds.data,
            enabled=train.buffers == "fold",
            exact=train.exact,
            in_order=worlds.mesh.pp == 1,
            is_compiled=train.compile,
            can_wait=_can_wait(worlds.mesh),
            over_batch=contract.over_batch,
        ),
        buffers=BufferPolicy(model=model, world=worlds.data, policy=train.buffers, exact=train.exact),
        update=update,
        random_streams=streams,
        precision=train.precision,
        exact=train.exact,
        sync_bn_weights=rounds,
        rng_turns=turns,
        undo_reduction=placed.reducer.undo if isinstance(placed.reducer, ErrorFeedbackReducer) else do_nothing,
    )


def _turns(settings: Settings, own: Sequence[MeshGroups]) -> HostRngTurns:
    gpu = shared_gpu([each.all_ranks.device for each in own])
    return HostRngTurns(timeout_seconds=settings.train.timeout_seconds, gpu=gpu)


def _can_wait(mesh: Mesh) -> bool:
    """Return True if a replica's forward may wait for another's: it runs on one rank, without collectives inside."""
    gathers = mesh.zero == 3 and mesh.dp_shard > 1
    return not (gathers or mesh.sites) and mesh.pp == mesh.ep == 1


def _own(plan: ExecutionPlan, settings: Settings, worlds: MeshGroups) -> list[MeshGroups]:
    """Return the mesh groups of each replica of this process."""
    if plan.processes > 1 or plan.replicas == 1:
        return [worlds]
    timeout = settings.train.timeout_seconds
    found = thread_worlds(replicas=plan.replicas, world=worlds.all_ranks, timeout_seconds=timeout)
    return [MeshGroups.from_replicas(each) for each in found]


def _notes_of_placement(
    placed: ParallelizedModel, plan: ExecutionPlan, contract: LossContract, *, world: World
) -> list[str]:
    notes = compression_notes(plan.compression, placed.reducer, named_parameters=placed.named_parameters, world=world)
    return [*notes, *hook_notes(placed.hooked_names, counts_first=contract.has_early_counts)]


def _equal_start(model: nn.Module, world: World) -> list[str]:
    differed = [name for names in world.gather_json(broadcast_initial_tensors(model, world=world)) for name in names]
    if not differed:
        return []
    return [f"warning: initial weights differed between ranks ({differed[0]}, ...); rank 0's were sent to all"]
