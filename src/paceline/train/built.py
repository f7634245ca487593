"""From a task to something that can train: job, settings, plan, world, model, optimizer, step."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.errors import JobError, raise_all
from paceline.job import Job
from paceline.place.batchnorm import StatisticsTape
from paceline.place.buffers import BufferPolicy
from paceline.place.exact import ExactReducer, Grid
from paceline.place.holding import Holding, all_of, all_shares
from paceline.place.meeting import ThreadWorld, thread_worlds
from paceline.place.replicate import BucketReducer, LocalReducer, Reducer, equal_start
from paceline.place.sync_bn import synchronise
from paceline.place.threads import Mirror, ThreadReducer, shared_gpu
from paceline.place.units import Named, trainable
from paceline.plan.settle import Plan
from paceline.spec.settings import Settings
from paceline.step.loss import LossContract
from paceline.step.parts import Parts
from paceline.step.spmd import SpmdStep
from paceline.step.threads import ThreadsStep
from paceline.step.turns import ALONE, SharedTurns
from paceline.step.update import Ema, Update
from paceline.streams import Streams, key, seed_all
from paceline.torch_private import guard_hooks
from paceline.train.apart import Unlisted
from paceline.train.fit import refuse_unfit, unfit_optimizers, unfit_schedules
from paceline.train.options import Options, given_options
from paceline.train.refuse import refuse_asked
from paceline.train.state import make_optimizers
from paceline.world import World
from paceline.worlds import Worlds


@dataclass(frozen=True, kw_only=True)
class Built:
    """One rank's share of a run, ready to step. `models` are this process's replicas; `model` is the first.

    `weights` are parameters and buffers as the ranks' models hold them, `kept` what the optimizers do: where they
    are sharded, `named` are this rank's parts of the parameters.
    """

    job: Job
    settings: Settings
    plan: Plan
    worlds: Worlds
    model: nn.Module
    models: Sequence[nn.Module]
    named: Sequence[Named]
    weights: Holding
    kept: Holding
    step: SpmdStep
    grid: Grid | None
    notes: tuple[str, ...]
    given: Options
    unlisted: Unlisted

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

    def close(self) -> None:
        """Remove what was hooked into the model."""
        self.step.close()


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
    model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(
            f"model= gave a {type(model).__name__}, expected a torch.nn.Module.", hint="model=lambda: MyModel()"
        )
    return model


def build(*, job: Job, settings: Settings, plan: Plan, world: World) -> Built:
    """Put one rank's share together.

    Raises:
        JobError, UsageError, Problems: something can't be had as asked.
    """
    refuse_asked(job, settings, plan)
    worlds = Worlds.of(world, mesh=plan.mesh) if plan.processes > 1 else Worlds.of_replicas(world)
    own = _own(plan, settings, worlds)
    models = [build_model(job, seed=settings.seed).to(each.every.device) for each in own]
    refuse_unfit(job, models[0])
    named = [trainable(model) for model in models]
    grids = [Grid(num_parameters=len(named[0])) if settings.train.exact else None for _ in own]
    notes = _equal_start(models[0], world)
    mirror = Mirror(models=models, grids=grids) if len(own) > 1 else None
    update, given = _update(job, settings, models[0], named[0], plan, world)
    turns = None if mirror is None else SharedTurns(gpu=shared_gpu([each.every.device for each in own]))
    reducers = [_reducer(members, named[0], each, grid) for members, each, grid in zip(named, own, grids, strict=True)]
    parts = [
        _parts(job, settings, model, each, reducer, update, turns)
        for model, each, reducer in zip(models, own, reducers, strict=True)
    ]
    return Built(
        job=job,
        settings=settings,
        plan=plan,
        worlds=worlds,
        model=models[0],
        models=models,
        named=named[0],
        weights=Holding(world=world, held=all_of(models[0])),
        kept=Holding(world=world, held=all_shares(named[0])),
        step=_step(parts, mirror, turns),
        grid=grids[0],
        notes=tuple(notes),
        given=given,
        unlisted=Unlisted(models[0]),
    )


def _parts(
    job: Job,
    settings: Settings,
    model: nn.Module,
    worlds: Worlds,
    reducer: Reducer,
    update: Update,
    turns: SharedTurns | None,
) -> Parts:
    """One replica's."""
    train = settings.train
    rounds = synchronise(model, world=worlds.data) if train.buffers == "sync_bn" else None
    streams = Streams(seed=settings.seed)
    streams.arm(model)
    return Parts(
        model=_compiled(model, settings),
        worlds=worlds,
        contract=LossContract(job=job, model=model),
        reducer=reducer,
        tape=StatisticsTape(model=model, world=worlds.data, enabled=train.buffers == "fold"),
        buffers=BufferPolicy(model=model, world=worlds.data, policy=train.buffers, exact=train.exact),
        update=update,
        streams=streams,
        precision=train.precision,
        exact=train.exact,
        rounds=rounds,
        turns=turns or ALONE,
    )


def _step(parts: Sequence[Parts], mirror: Mirror | None, turns: SharedTurns | None) -> SpmdStep:
    if mirror is None or turns is None:
        return SpmdStep(parts[0])
    return ThreadsStep(parts[0], others=parts[1:], mirror=mirror, turns=turns)


def _own(plan: Plan, settings: Settings, worlds: Worlds) -> list[Worlds]:
    """One for each replica of this process."""
    if plan.processes > 1 or plan.replicas == 1:
        return [worlds]
    timeout = settings.train.timeout_seconds
    found = thread_worlds(replicas=plan.replicas, world=worlds.every, timeout_seconds=timeout)
    return [Worlds.of_replicas(each) for each in found]


def eval_batch_size(built: Built) -> int:
    """Samples in one forward of an evaluation; a loss over the batch is evaluated on as many as it is trained on."""
    plan = built.plan
    derived = plan.global_batch_size if built.job.loss_over == "batch" else plan.micro_batch_size
    return built.settings.eval.batch_size or derived


def _equal_start(model: nn.Module, world: World) -> list[str]:
    differed = [name for names in world.gather_json(equal_start(model, world=world)) for name in names]
    if not differed:
        return []
    return [f"warning: start weights differed between ranks ({differed[0]}, ...); rank 0's were given to all"]


def _reducer(named: Sequence[Named], home: Sequence[Named], worlds: Worlds, grid: Grid | None) -> Reducer:
    """`home` is where the gradients of this process's replicas end."""
    world = worlds.summed
    if grid is not None:
        return ExactReducer(named=named, world=world, grid=grid)
    if isinstance(world, ThreadWorld):
        return ThreadReducer(named=named, home=home, world=world)
    return LocalReducer(named=named) if world.world_size == 1 else BucketReducer(named=named, world=world)


def _update(
    job: Job, settings: Settings, model: nn.Module, named: Sequence[Named], plan: Plan, world: World
) -> tuple[Update, Options]:
    """The optimizer's side, and the options as the job gives them: a schedule writes to them at once."""
    optimizers = make_optimizers(job, model)
    factor = lr_factor(settings.train.lr_scaling, plan.global_batch_size / job.global_batch_size)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["lr"] * factor if factor != 1.0 else group["lr"]
    given = given_options(optimizers)
    schedules = [job.lr_schedule(optimizer) for optimizer in optimizers] if job.lr_schedule else []
    raise_all([*unfit_optimizers(optimizers), *unfit_schedules(schedules)])
    fp16 = settings.train.precision == "fp16"
    update = Update(
        named=named,
        optimizers=optimizers,
        schedules=schedules,
        scaler=torch.amp.GradScaler(world.device.type) if fp16 else None,
        max_grad_norm=settings.train.max_grad_norm,
        check_finite=not fp16,
        skip_nonfinite=settings.train.on_nonfinite == "skip",
        ema=Ema(model=model, decay=job.ema) if job.ema is not None else None,
    )
    return update, given


def lr_factor(rule: str, ratio: float) -> float:
    """What the learning rate is multiplied by when the batch is `ratio` times the job's own.

    Linear: Goyal et al. 2017 (SGD). Square root: Krizhevsky 2014, Malladi et al. 2022 (Adam).
    """
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def _compiled(model: nn.Module, settings: Settings) -> nn.Module:
    if settings.train.compile:
        model.compile()
    return model
