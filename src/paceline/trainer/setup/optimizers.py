"""The optimizer update of a run: optimizers for this rank's parameters, LR schedulers, loss scaler and EMA."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.optimizer_options import Options, factory_options
from paceline.checkpoint.train_state import check_optimizers, create_optimizers
from paceline.comm.process_group import World
from paceline.config.settings import Settings
from paceline.errors import raise_all
from paceline.job import Job
from paceline.parallel.gradients.joint_grad_norm import joint_norm
from paceline.parallel.gradients.partition import do_nothing
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.parallel.module_access.sharded_tensors import ShardedTensors
from paceline.parallel.placement import ParallelizedModel
from paceline.parallel.sharding.optimizer_offload import offload_state
from paceline.parallel.sharding.zero_sharded_optimizer import ShardedOptimizerFactory, try_optimizer_factory
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.step.optimizer_update import Ema, GradNormFunction, OptimizerUpdate, stored_values
from paceline.step.spike_detector import SpikeDetector
from paceline.step.update_rules import step_rule
from paceline.torch_internals.private_api import JointScaler
from paceline.trainer.checks.check_job import unfit_lr_schedulers, unfit_optimizers


def build_optimizer_factory(
    job: Job, named_parameters: Sequence[NamedParameter], *, plan: ExecutionPlan, exact: bool
) -> ShardedOptimizerFactory | None:
    """Return a factory of this rank's optimizers, or None if the layout only replicates the model.

    The job's optimizer function runs once on the shapes of the full model, to check it and to learn the groups.

    Raises:
        JobError, LayoutError: groups that don't match the model, or an optimizer that needs full tensors.
    """
    if plan.mesh.ranks == plan.mesh.dp_replicate:
        return None
    optimizer_factory = try_optimizer_factory(job.optimizer, named_parameters)
    raise_all(unfit_optimizers(optimizer_factory.optimizers))
    check_optimizers(optimizer_factory.optimizers, {id(p): name for name, p in optimizer_factory.pairs})
    if plan.mesh.zero == 3:
        optimizer_factory.refuse_rows(layout=plan.layout, exact=exact)
    elif plan.mesh.pp > 1 or plan.mesh.tp > 1 or plan.mesh.ep > 1:
        optimizer_factory.refuse_optimizers_combining_parameters()
    return optimizer_factory


def make_update(
    job: Job,
    settings: Settings,
    plan: ExecutionPlan,
    model: nn.Module,
    parallelized_model: ParallelizedModel,
    optimizer_factory: ShardedOptimizerFactory | None,
    *,
    world: World,
) -> tuple[OptimizerUpdate, Options]:
    """Return the optimizer update, and the optimizers' options before an LR scheduler overwrites them."""
    if optimizer_factory is not None:
        split_names = _partially_held_parameters(parallelized_model)
        optimizer_factory.refuse_slices(split_names, layout=plan.layout, exact=settings.train.exact)
    optimizers = (
        create_optimizers(job, model)
        if optimizer_factory is None
        else optimizer_factory.make_optimizers(parallelized_model.named_parameters)
    )
    factor = lr_factor(settings.train.lr_scaling, plan.global_batch_size / job.global_batch_size)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["lr"] * factor if factor != 1.0 else group["lr"]
    if "optimizer" in plan.asked.offload:
        for optimizer in optimizers:
            offload_state(optimizer)
    initial_options = factory_options(optimizers)
    lr_schedulers = [job.lr_schedule(optimizer) for optimizer in optimizers] if job.lr_schedule else []
    raise_all([*unfit_optimizers(optimizers), *unfit_lr_schedulers(lr_schedulers, optimizers)])
    fp16, traits = settings.train.precision == "fp16", step_rule(plan.update_rule).traits
    update = OptimizerUpdate(
        named_parameters=parallelized_model.named_parameters,
        optimizers=optimizers,
        lr_schedulers=lr_schedulers,
        scaler=make_scaler(parallelized_model.optim_shards, world) if fp16 else None,
        max_grad_norm=settings.train.max_grad_norm,
        check_finite=not fp16,
        skip_nonfinite=settings.train.on_nonfinite == "skip",
        rolls_back=settings.train.on_nonfinite == "rollback",
        spike_detector=_make_spike_detector(settings, world),
        on_empty=settings.train.on_empty,
        ema=Ema(
            weights=_ema_parameters(parallelized_model), decay=job.ema, after_swap=parallelized_model.sync_after_load
        )
        if job.ema is not None
        else None,
        joint_grad_norm=_build_norm(parallelized_model, settings, world=world) if traits.measures_joint_norm else None,
        sync_after_update=parallelized_model.sync_after_update if traits.sends_updates else do_nothing,
        on_update=None if job.on_update is None else partial(job.on_update, model),
    )
    return update, initial_options


def _make_spike_detector(settings: Settings, world: World) -> SpikeDetector | None:
    if settings.train.on_spike == "ignore":
        return None
    return SpikeDetector(sigma=settings.train.spike_sigma, skips=settings.train.on_spike == "skip", world=world)


def lr_factor(rule: str, ratio: float) -> float:
    """Return the factor for the learning rate if the global batch is `ratio` times the job's `global_batch_size`.

    `rule` is the setting `train.lr_scaling`. "linear" is due to Goyal et al. 2017 (SGD), and "sqrt" to Krizhevsky 2014
    and Malladi et al. 2022 (Adam).
    """
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def make_scaler(shards: ShardedTensors, world: World, **options: Any) -> torch.amp.GradScaler:
    """Return the loss scaler of this rank. If ranks hold shards, an overflow on one rank skips the step on all."""
    device = world.device.type
    if shards.is_unsharded:
        return torch.amp.GradScaler(device, **options)
    scaler = JointScaler(device, all_reduce_max=lambda found: world.all_reduce(found, op="max"), **options)
    scaler.scale(torch.zeros((), device=world.device))  # initialise it: most pipeline stages have no loss to scale
    return scaler


def _partially_held_parameters(parallelized_model: ParallelizedModel) -> set[str]:
    """Return the parameters of which a rank's optimizer holds only a part; the result is equal on every rank."""
    shards = parallelized_model.optim_shards
    return {name for name in shards.names if any(part.numel and not part.is_full for part in shards.shard_specs(name))}


def _ema_parameters(parallelized_model: ParallelizedModel) -> dict[str, Tensor]:
    weights = parallelized_model.weights
    tensors = {name: weights.local_tensors[name].tensor for name in weights.names if name in weights.parameter_names}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None and tensor.is_floating_point()}


def _build_norm(parallelized_model: ParallelizedModel, settings: Settings, *, world: World) -> GradNormFunction | None:
    """Return the function that measures the norm of the whole gradient; None if torch's norm of `.grad` is enough."""
    exact = settings.train.exact and settings.train.max_grad_norm is not None
    if parallelized_model.optim_shards.is_unsharded and not exact:
        return None
    owned_parameters = parallelized_model.owned_parameters()
    worlds = [] if parallelized_model.optim_shards.is_unsharded else [world]

    def norm() -> Tensor:
        return joint_norm(
            [stored_values(p.grad) for p in owned_parameters if p.grad is not None], worlds=worlds, exact=exact
        )

    return norm
