"""The optimizer update of a run: the job's optimizers on this rank's parameters, schedules, loss scaler and average."""

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
from paceline.step.optimizer_update import Ema, GradNormFunction, OptimizerUpdate, gradient_values
from paceline.step.update_rules import step_rule
from paceline.torch_internals.private_api import JointScaler
from paceline.trainer.checks.check_job import unfit_optimizers, unfit_schedules


def learn_rules(
    job: Job, named: Sequence[NamedParameter], *, plan: ExecutionPlan, exact: bool
) -> ShardedOptimizerFactory | None:
    """Run the job's optimizer factory on the full model's shapes; return None if every rank holds the full model.

    Raises:
        JobError, LayoutError: groups that don't match the model, or an optimizer that needs full tensors.
    """
    if plan.mesh.ranks == plan.mesh.dp_replicate:
        return None
    rules = try_optimizer_factory(job.optimizer, named)
    raise_all(unfit_optimizers(rules.optimizers))
    check_optimizers(rules.optimizers, {id(p): name for name, p in rules.pairs})
    if plan.mesh.zero == 3:
        rules.refuse_rows(layout=plan.layout, exact=exact)
    elif plan.mesh.pp > 1 or plan.mesh.tp > 1 or plan.mesh.ep > 1:
        rules.refuse_combining_rules()
    return rules


def make_update(
    job: Job,
    settings: Settings,
    plan: ExecutionPlan,
    model: nn.Module,
    placed: ParallelizedModel,
    rules: ShardedOptimizerFactory | None,
    *,
    world: World,
) -> tuple[OptimizerUpdate, Options]:
    """Return the optimizer update, and the optimizers' options before a schedule overwrites them."""
    if rules is not None:
        rules.refuse_slices(_pieces(placed), layout=plan.layout)
    optimizers = create_optimizers(job, model) if rules is None else rules.make_optimizers(placed.named_parameters)
    factor = lr_factor(settings.train.lr_scaling, plan.global_batch_size / job.global_batch_size)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = group["lr"] * factor if factor != 1.0 else group["lr"]
    if "optimizer" in plan.asked.offload:
        for optimizer in optimizers:
            offload_state(optimizer)
    given = factory_options(optimizers)
    schedules = [job.lr_schedule(optimizer) for optimizer in optimizers] if job.lr_schedule else []
    raise_all([*unfit_optimizers(optimizers), *unfit_schedules(schedules, optimizers)])
    fp16, traits = settings.train.precision == "fp16", step_rule(plan.update_rule).traits
    update = OptimizerUpdate(
        named_parameters=placed.named_parameters,
        optimizers=optimizers,
        schedules=schedules,
        scaler=make_scaler(placed.optim_shards, world) if fp16 else None,
        max_grad_norm=settings.train.max_grad_norm,
        check_finite=not fp16,
        skip_nonfinite=settings.train.on_nonfinite == "skip",
        on_empty=settings.train.on_empty,
        ema=Ema(weights=_averaged(placed), decay=job.ema, after_swap=placed.sync_after_load)
        if job.ema is not None
        else None,
        joint_grad_norm=_norm(placed, settings, world=world) if traits.measures_joint_norm else None,
        spread=placed.sync_after_update if traits.spreads_updates else do_nothing,
        on_update=None if job.on_update is None else partial(job.on_update, model),
    )
    return update, given


def lr_factor(rule: str, ratio: float) -> float:
    """Return the factor for the learning rate if the batch is `ratio` times as large as the job's own.

    Linear: Goyal et al. 2017 (SGD). Square root: Krizhevsky 2014, Malladi et al. 2022 (Adam).
    """
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


def make_scaler(kept: ShardedTensors, world: World, **options: Any) -> torch.amp.GradScaler:
    """Return the loss scaler of this rank. Where ranks hold shards, an overflow on one rank counts on all."""
    device = world.device.type
    if kept.is_unsharded:
        return torch.amp.GradScaler(device, **options)
    scaler = JointScaler(device, join=lambda found: world.all_reduce(found, op="max"), **options)
    scaler.scale(torch.zeros((), device=world.device))  # initialise it: most pipeline stages have no loss to scale
    return scaler


def _pieces(placed: ParallelizedModel) -> set[str]:
    """Return the parameters of which a rank's optimizer holds only a part; the result is equal on every rank."""
    kept = placed.optim_shards
    return {name for name in kept.names if any(part.numel and not part.is_full for part in kept.shard_specs(name))}


def _averaged(placed: ParallelizedModel) -> dict[str, Tensor]:
    weights = placed.weights
    held = {name: weights.local_tensors[name].tensor for name in weights.names if name in weights.parameter_names}
    return {name: tensor for name, tensor in held.items() if tensor is not None and tensor.is_floating_point()}


def _norm(placed: ParallelizedModel, settings: Settings, *, world: World) -> GradNormFunction | None:
    """Return the norm over all ranks if they hold shards or the norm must be exact; None if each rank uses its own."""
    exact = settings.train.exact and settings.train.max_grad_norm is not None
    if placed.optim_shards.is_unsharded and not exact:
        return None
    mine = placed.owned_parameters()
    worlds = [] if placed.optim_shards.is_unsharded else [world]

    def norm() -> Tensor:
        return joint_norm([gradient_values(p.grad) for p in mine if p.grad is not None], worlds=worlds, exact=exact)

    return norm
