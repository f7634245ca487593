"""From a task to something that can train: job, settings, plan, world, model, optimizer, step."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from paceline.errors import JobError
from paceline.job import Job
from paceline.place.alike import equal_start
from paceline.place.batchnorm import StatisticsTape
from paceline.place.buffers import BufferPolicy
from paceline.place.compose import Placed, beside, compose
from paceline.place.compress.held import HeldReducer
from paceline.place.compress.make import told
from paceline.place.divide import nothing
from paceline.place.exact import Grid
from paceline.place.holding import Holding, all_of, all_shares
from paceline.place.meeting import ThreadWorld, thread_worlds
from paceline.place.rules import Rules
from paceline.place.shared import SharedModel
from paceline.place.start.stored import Stored
from paceline.place.start.tensors import refuse_tensors
from paceline.place.sync_bn import synchronise
from paceline.place.threads import Mirror, shared_gpu
from paceline.place.units import Named, trainable
from paceline.plan.mesh import DATA, Mesh
from paceline.plan.settle import Plan
from paceline.spec.settings import Settings
from paceline.spec.update import Kind
from paceline.step.loss import LossContract
from paceline.step.parts import Parts
from paceline.step.spmd import SpmdStep
from paceline.step.turns import ALONE, SharedTurns
from paceline.step.update import Update
from paceline.streams import Streams, key, seed_all
from paceline.talk import say
from paceline.torch_private import guard_hooks
from paceline.train.apart import Unlisted
from paceline.train.begin import Begun, begin, begin_whole
from paceline.train.context import UNTRIED, can_be_tried, context_of, try_experts
from paceline.train.example import Example
from paceline.train.feeds import JobData
from paceline.train.fit import refuse_unfit
from paceline.train.loss_notes import loss_notes
from paceline.train.modes import put_into_training
from paceline.train.options import Options
from paceline.train.refuse import refuse_asked, refuse_foreign, unheard_placing
from paceline.train.served import among_servers
from paceline.train.steps import make_step
from paceline.train.updates import learn_rules, make_update
from paceline.world import World
from paceline.worlds import Worlds


@dataclass(frozen=True, kw_only=True)
class Built:
    """One rank's share of a run, ready to step. `models` are this process's replicas; `model` is the first.

    `site` are the ranks that keep one set of weights between them: all, but where sites train on their own.
    `weights` are parameters and buffers as the ranks' models hold them, `kept` what the optimizers do: where they
    are sharded, `named` are this rank's parts of the parameters.
    """

    job: Job
    settings: Settings
    plan: Plan
    worlds: Worlds
    site: World
    model: nn.Module
    models: Sequence[nn.Module]
    named: Sequence[Named]
    weights: Holding
    kept: Holding
    placed: Placed
    step: SpmdStep
    grid: Grid | None
    notes: tuple[str, ...]
    given: Options
    unlisted: Unlisted
    data: JobData

    @property
    def world(self) -> World:
        """Everybody."""
        return self.worlds.every

    @property
    def update(self) -> Update:
        """The optimizer's side."""
        return self.step.parts.update

    def as_evaluated(self) -> AbstractContextManager[None]:
        """With the weights that metrics are measured on: the average, where the job has one."""
        return nullcontext() if self.update.ema is None else self.update.ema.in_place()

    def refuse_training(self) -> None:
        """Refuse, before the first step, a model that can only be evaluated in this layout.

        Raises:
            LayoutError: no gradient would come back through it.
        """
        if self.placed.piped is not None:
            self.placed.piped.stages.refuse_training()

    def close(self) -> None:
        """Remove what was hooked into the model."""
        self.step.close()
        self.placed.close()


def job_layer(job: Job) -> dict[str, Any]:
    """The settings that a job brings; a file and the command line go over them.

    Raises:
        JobError: it names the run folder, which the command needs before it loads the job.
    """
    layer = dict(job.settings or {})
    if "run_dir" in layer:
        raise JobError(
            f"Job(settings={{'run_dir': {str(layer['run_dir'])!r}}}): a job can't say where it runs.",
            cause="the run folder is there before the job is loaded",
            hint=f"--run-dir {layer['run_dir']}, run_dir = ... in the file of --config, or pl.Run(job, run_dir=...)",
        )
    for name in ("micro_batch_size", "max_grad_norm"):
        value = getattr(job, name)
        if value is not None:
            layer.setdefault(f"train.{name}", value)
    return layer


def build_model(job: Job, *, seed: int) -> nn.Module:
    """The model of one plain build: its draws depend on the seed alone."""
    guard_hooks()
    seed_all(key(seed, "build"))
    try:
        model = job.model()
    except (ValueError, RuntimeError) as error:
        if "process group" not in str(error):
            raise
        raise JobError(
            f"model= failed: {error}",
            cause="DistributedDataParallel or another wrapper inside model=, which Paceline brings itself",
            hint="model= without it; --layout ddp or fsdp",
        ) from error
    if not isinstance(model, nn.Module):
        raise JobError(
            f"model= gave a {type(model).__name__}, expected a torch.nn.Module.", hint="model=lambda: MyModel()"
        )
    if any(parameter.is_meta for parameter in model.parameters()):
        raise JobError(
            "model= gave parameters without memory (on the device meta), so they have no start values.",
            cause='built under torch.device("meta"), to be filled later',
            hint="leave it out: above init.limit a model is built without memory by itself, and its init is replayed",
        )
    refuse_tensors(model)
    return model


def build(*, job: Job, settings: Settings, plan: Plan, world: World) -> Built:
    """Put one rank's share together.

    Raises:
        JobError, UsageError, Problems: something can't be had as asked.
    """
    refuse_asked(job, settings, plan)
    plan = among_servers(plan, servers=world.world_size)
    worlds = Worlds.of(world, mesh=plan.mesh) if plan.processes > 1 else Worlds.of_replicas(world)
    own = _own(plan, settings, Worlds.of_site(world, mesh=plan.mesh) if plan.rule.has_sites else worlds)
    site = own[0].every if len(own) == 1 else world
    begun = [_begun(job, settings, each) for each in own]
    models = [one.on(each.every.device) for one, each in zip(begun, own, strict=True)]
    refuse_unfit(job, models[0], takes_sparse=plan.rule.has_servers)
    refuse_foreign(models[0], plan)
    named = [trainable(model) for model in models]
    notes = [*unheard_placing(settings.place, plan), *begun[0].notes, *put_into_training(models)]
    notes += _equal_start(models[0], world) if begun[0].is_whole else []
    notes += [] if world.is_imagined else loss_notes(job.loss, model=models[0], world=world)
    shared = SharedModel(models[0], world=world) if plan.rule.kind is Kind.HOGWILD else None
    rules = learn_rules(job, named[0], plan=plan, exact=settings.train.exact)
    unlisted, data = Unlisted(models[0]), JobData(job, settings)
    contracts = [LossContract(job=job, model=model, asks=not world.is_imagined) for model in models]
    if len(own) > 1:
        exact = settings.train.exact
        placed = [
            beside(model, named=members, home=named[0], world=each.every, exact=exact)
            for model, members, each in zip(models, named, own, strict=True)
            if isinstance(each.every, ThreadWorld)
        ]
    else:
        placed = [_placed(job, settings, plan, begun[0], models[0], contracts[0], own[0], rules, data)]
        notes += begun[0].late.notes if begun[0].late is not None else []
        notes += told(plan.wire, placed[0].reducer, named=placed[0].named, world=worlds.summed)
    mirror = Mirror(models=models, grids=[one.grid for one in placed]) if len(own) > 1 else None
    update, given = make_update(job, settings, plan, models[0], placed[0], rules, world=site)
    turns = None if mirror is None else SharedTurns(gpu=shared_gpu([each.every.device for each in own]))
    parts = [
        _parts(settings, model, each, one, contract, update, turns)
        for model, each, one, contract in zip(models, own, placed, contracts, strict=True)
    ]
    return Built(
        job=job,
        settings=settings,
        plan=plan,
        worlds=worlds,
        site=site,
        model=models[0],
        models=models,
        named=placed[0].named,
        weights=placed[0].weights if mirror is None else Holding(world=world, held=all_of(models[0])),
        kept=placed[0].kept if mirror is None else Holding(world=world, held=all_shares(named[0])),
        placed=placed[0],
        step=make_step(plan, parts, placed[0], mirror, turns, shared, replicas=worlds.replicate),
        grid=placed[0].grid,
        notes=tuple(notes),
        given=given,
        unlisted=unlisted,
        data=data,
    )


def begun_whole(job: Job, settings: Settings) -> Callable[[], nn.Module]:
    """The model of one process, whole, with the start values of every layout."""
    plain = partial(build_model, job, seed=settings.seed)
    return partial(begin_whole, plain, seed=settings.seed, limit_bytes=settings.init.limit, stored=_stored(job))


def _begun(job: Job, settings: Settings, worlds: Worlds) -> Begun:
    plain = partial(build_model, job, seed=settings.seed)
    limit = settings.init.limit
    return begin(plain, seed=settings.seed, limit_bytes=limit, worlds=worlds, stored=_stored(job))


def _stored(job: Job) -> Stored | None:
    return job.model if isinstance(job.model, Stored) else None


def _placed(
    job: Job,
    settings: Settings,
    plan: Plan,
    begun: Begun,
    model: nn.Module,
    contract: LossContract,
    worlds: Worlds,
    rules: Rules | None,
    data: JobData,
) -> Placed:
    exact = settings.train.exact
    whole = list(rules.whole(exact=exact)) if rules is not None and plan.mesh.zero in (1, 2) else []
    whole = [member.name for member in trainable(model)] if plan.rule.has_servers else whole
    device = worlds.every.device
    example = Example(job=job, settings=settings, plan=plan, model=model, contract=contract, device=device, data=data)
    if set(plan.mesh.split) - set(DATA):
        example.learn() if begun.late is None else begun.late.valued(example.learn)
    context = context_of(job, model=model, contract=contract, worlds=worlds, example=example)
    if plan.mesh.ep > 1 and can_be_tried(model) and not worlds.every.is_imagined:
        try_experts(model=model, contract=contract, example=example)
    untried = [] if can_be_tried(model) else [a for a in ("cp", "ep") if plan.mesh.size(a) > 1]
    for note in (UNTRIED.format(axis) for axis in untried):
        say(note) if begun.late is None else begun.late.notes.append(note)
    return compose(
        model,
        asked=plan.asked,
        worlds=worlds,
        example=example,
        say=say,
        how=settings.place,
        exact=exact,
        compiles=settings.train.compile,
        whole=whole,
        context=context,
        rows=begun.rows,
        late=begun.late,
        compress=plan.wire,
    )


def _parts(
    settings: Settings,
    model: nn.Module,
    worlds: Worlds,
    placed: Placed,
    contract: LossContract,
    update: Update,
    turns: SharedTurns | None,
) -> Parts:
    """One replica's."""
    train = settings.train
    rounds = synchronise(model, world=worlds.data) if train.buffers == "sync_bn" else None
    streams = Streams(seed=settings.seed)
    streams.arm(model)
    return Parts(
        model=model,
        worlds=worlds,
        contract=contract,
        reducer=placed.reducer,
        context=placed.context,
        tape=StatisticsTape(
            model=model,
            world=worlds.data,
            enabled=train.buffers == "fold",
            exact=train.exact,
            in_order=worlds.mesh.pp == 1,
            compiles=train.compile,
            can_wait=_can_wait(worlds.mesh),
            over_batch=contract.over_batch,
        ),
        buffers=BufferPolicy(model=model, world=worlds.data, policy=train.buffers, exact=train.exact),
        update=update,
        streams=streams,
        precision=train.precision,
        exact=train.exact,
        rounds=rounds,
        turns=turns or ALONE,
        take_back=placed.reducer.undo if isinstance(placed.reducer, HeldReducer) else nothing,
    )


def _can_wait(mesh: Mesh) -> bool:
    """Whether a replica's forward may wait for another replica's: inside it meets none, and it runs as a whole."""
    gathers = mesh.zero == 3 and mesh.dp_shard > 1
    return not (gathers or mesh.sites) and mesh.pp == mesh.ep == 1


def _own(plan: Plan, settings: Settings, worlds: Worlds) -> list[Worlds]:
    """One for each replica of this process."""
    if plan.processes > 1 or plan.replicas == 1:
        return [worlds]
    timeout = settings.train.timeout_seconds
    found = thread_worlds(replicas=plan.replicas, world=worlds.every, timeout_seconds=timeout)
    return [Worlds.of_replicas(each) for each in found]


def _equal_start(model: nn.Module, world: World) -> list[str]:
    differed = [name for names in world.gather_json(equal_start(model, world=world)) for name in names]
    if not differed:
        return []
    return [f"warning: start weights differed between ranks ({differed[0]}, ...); rank 0's were given to all"]
