"""Checks of combinations of job, settings and plan that are not supported."""

import torch
from torch import nn

from paceline.config.merge_settings import default_value
from paceline.config.settings import Settings
from paceline.errors import JobError, LayoutError, PacelineError, UsageError, raise_all
from paceline.job import Job
from paceline.parallel.data_parallel.exact_reduction import MAX_MICROBATCHES
from paceline.parallel.data_parallel.thread_replicas import thread_layout_errors
from paceline.planner.layout.compression_checks import refuse_compressed_settings
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.layout_checks import check_layout_settings
from paceline.planner.layout.update_rule_checks import check_update_settings
from paceline.step.update_rules import step_rule
from paceline.trainer.checks.evaluation_checks import best_rule


def check_compatibility(job: Job, settings: Settings, plan: ExecutionPlan) -> None:
    """Refuse incompatible combinations of job, settings and plan. The error lists all of them.

    A `best=` that cannot be parsed is reported alone.

    Raises:
        JobError, UsageError, Problems
    """
    train_settings = settings.train
    problems = check_layout_settings(plan.asked, plan.mesh, settings)
    problems += check_update_settings(plan.update_rule, settings, device=plan.device)
    problems += refuse_compressed_settings(
        plan.compression, settings, backend=plan.backend if plan.device == "cuda" else ""
    )
    problems += step_rule(plan.update_rule).refuse_job(job, settings, plan)
    problems += _check_on_update(job, plan)
    if train_settings.exact:
        problems += _check_exact(plan, train_settings.precision, settings.train.sequence_shards)
    problems += _check_split_model(job, plan)
    if plan.replicas > plan.processes:
        problems += thread_layout_errors(buffers=train_settings.buffers, compiled=train_settings.compile)
    if train_settings.precision == "fp16" and job.loss is not None and job.count is None:
        problems.append(
            JobError(
                "fp16 needs the counts before the first forward, so that the scaled loss stays in range.",
                hint="count=lambda batch: number of targets, or --train.precision bf16",
            )
        )
    if job.loss_over == "batch":
        problems += _check_batch_loss(job, settings, plan)
    best_rule(job)
    raise_all(problems)


def _check_on_update(job: Job, plan: ExecutionPlan) -> list[PacelineError]:
    """Return errors for `on_update`. It needs the full weights on every rank, equal after each update."""
    if job.on_update is None:
        return []
    if not plan.update_rule.is_synchronous:
        return [
            JobError(f"on_update= with --update {plan.update}: each rank makes its own updates.", hint="--update sync")
        ]
    mesh = plan.mesh
    if mesh.zero == 3 or mesh.pp > 1 or mesh.tp > 1 or mesh.ep > 1:
        return [
            LayoutError(
                "on_update= needs whole weights on every rank, but this layout gives each rank parts of them.",
                cause="a teacher that follows the weights, or weights that are clamped",
                hint="--layout ddp, zero1 or zero2",
            )
        ]
    return []


def unused_placement_notes(settings: Settings, plan: ExecutionPlan) -> list[str]:
    """Return notes about placement settings for an axis that this layout does not have."""
    mesh, uses_tensors = plan.mesh, plan.mesh.tp > 1 or settings.train.tensor_shards is not None
    users = {
        "place.units": ("fsdp gathers", mesh.zero == 3),
        "place.reshard": ("fsdp gathers", mesh.zero == 3),
        "place.prefetch": ("fsdp gathers", mesh.zero == 3),
        "place.stages": ("pp cuts stages", mesh.pp > 1),
        "place.balance": ("pp cuts stages", mesh.pp > 1),
        "place.cut": ("pp cuts stages", mesh.pp > 1),
        "place.tensor_plan": ("tp splits modules", uses_tensors),
        "place.replicate": ("tp splits modules", uses_tensors),
    }
    return [
        f"note: {name} sets how {user}, which does not apply to {plan.layout}"
        for name, (user, is_used) in users.items()
        if not is_used and getattr(settings.place, name.partition(".")[2]) != default_value(name)
    ]


def refuse_compiled_model(model: nn.Module, plan: ExecutionPlan) -> None:
    """Refuse a model that torch has already compiled, if the layout must access the model's modules.

    Raises:
        LayoutError
    """
    inspecting_axes = [axis for axis in plan.mesh.split_axes if axis in ("pp", "cp", "tp", "ep")]
    inspecting_axes += ["fsdp"] if plan.mesh.zero == 3 else []
    if inspecting_axes and isinstance(model, torch.jit.ScriptModule):
        raise LayoutError(
            f"{inspecting_axes[0]} can't look inside a ScriptModule ({model.original_name}).",
            cause="torch.jit.script or trace in model=: its modules and forward are no longer Python code",
            hint="model= without torch.jit, or --layout ddp, zero1 or zero2",
        )
    if inspecting_axes and hasattr(model, "_orig_mod"):
        raise LayoutError(
            f"{inspecting_axes[0]} can't look inside a model that torch.compile has wrapped.",
            cause="torch.compile(...) in model=",
            hint="model= without torch.compile; --train.compile compiles each block, after it is placed",
        )


def _check_batch_loss(job: Job, settings: Settings, plan: ExecutionPlan) -> list[PacelineError]:
    problems: list[PacelineError] = []
    if job.loss is None:
        problems.append(JobError('loss_over="batch" needs loss=: the model\'s own loss sees only its microbatch.'))
    if plan.num_micro > plan.replicas:
        train_settings, cause = settings.train, "the loss needs the outputs of the whole batch at once"
        hint = "leave --train.micro_batch_size out, or more ranks"
        if not train_settings.micro_batch_size and not train_settings.gradient_accumulation_steps:
            cause += f"; this run was started with microbatches of {plan.micro_batch_size}"
            samples_per_replica = -(-plan.global_batch_size // plan.replicas)
            hint = f"--train.micro_batch_size {samples_per_replica} --allow micro_batch_size, or more ranks"
        problems.append(
            UsageError(
                f'loss_over="batch" does not support accumulation: {plan.num_micro} microbatches for '
                f"{plan.replicas} replicas.",
                cause=cause,
                hint=hint,
            )
        )
    for is_on, name in ((settings.train.exact, "--train.exact"), (settings.train.buffers == "sync_bn", "sync_bn")):
        if is_on:
            problems.append(
                UsageError(f'loss_over="batch" with {name} is not supported.', hint="leave one of them out")
            )
    return problems


def _check_split_model(job: Job, plan: ExecutionPlan) -> list[PacelineError]:
    """Return errors for a job that a split model cannot run."""
    problems: list[PacelineError] = []
    mesh = plan.mesh
    if job.loss_over == "batch" and (mesh.pp > 1 or mesh.cp > 1 or mesh.zero == 3 or mesh.ep > 1):
        cause = "all outputs are gathered before the loss, but these ranks also communicate within the forward"
        problems.append(
            UsageError(
                f'loss_over="batch" with {plan.layout} is not supported.', cause=cause, hint="--layout ddp, zero2 or tp"
            )
        )
    return problems


def _check_exact(plan: ExecutionPlan, precision: str, sequence_shards: int | None) -> list[PacelineError]:
    problems: list[PacelineError] = []
    if plan.device != "cpu":
        problems.append(UsageError("exact mode is proven on CPUs only so far.", hint="--device cpu"))
    if precision == "fp16":
        problems.append(
            UsageError("exact mode with fp16 is not supported: its loss scale may differ.", hint="bf16 or fp32")
        )
    if plan.num_micro * (sequence_shards or 1) > MAX_MICROBATCHES:
        shards = f" of {sequence_shards} sequence shards" if sequence_shards else ""
        problems.append(
            UsageError(
                f"exact mode adds at most {MAX_MICROBATCHES} gradients, but this run has {plan.num_micro} "
                f"microbatches{shards}.",
                hint="a larger --train.micro_batch_size",
            )
        )
    return problems
