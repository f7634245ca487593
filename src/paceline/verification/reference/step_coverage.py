"""A record of what the compared steps exercised, and statements about what they did not.

A verdict says nothing about code that no compared step has run, or whose fault no compared number would show. Rank 0
records each rung's steps from the reference, which sees the whole batch and every gradient.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from paceline.config.layout import LayoutKind
from paceline.config.settings import Settings
from paceline.console.formatting import first_names, plural
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.parallel.expert_parallel.discovery import has_routed_forward
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.step.update_rules import step_rule
from paceline.verification.reference.reference import Reference, ReferenceGradient, RunPosition
from paceline.verification.tensor_distance import euclidean_norm

# A gradient is rounding if, in float64, its elements are at most this fraction of another gradient's, and in the job's
# precision they are larger by at least the factor. A small gradient that is no rounding has one size in both.
_MAX_ROUNDING_SIZE, _MIN_ROUNDING_GROWTH = 1e-12, 1e3
_MAX_RECORDED_SIZE = 1e-3
_MAX_EXPERTS = 4
_DOUBLE_TYPES = (torch.float64, torch.complex128)


@dataclass(frozen=True, kw_only=True)
class StepCoverage:
    """The record of what the steps of one rung exercised. Its fields are plain JSON."""

    num_updates: int = 0
    num_norms: int = 0
    """The number of gradient norms that were compared with the limit of clipping."""
    num_clipped: int = 0
    """The number of these norms that were above it."""
    num_learning_rates: int = 0
    """The number of updates with a learning rate of their own; 1 if the rate was constant."""
    has_schedule: bool = False
    has_optimizer_state: bool = False
    max_microbatches: int = 0
    """The largest number of microbatches of one step."""
    max_accumulated: int = 0
    """The largest number of microbatches of one replica in one step."""
    has_counts: bool = False
    """True if the loss weights each microbatch by its count, and some step has several microbatches."""
    has_unequal_counts: bool = False
    """True if, in some step, two microbatches have different counts of targets or samples."""
    last_epoch: int = 0
    absent_gradients: list[str] = field(default_factory=list)
    """The trained parameters that had no gradient in any step."""
    zero_gradients: list[str] = field(default_factory=list)
    """The trained parameters whose gradient was zero in every step that had one."""
    idle_experts: dict[str, list[int]] = field(default_factory=dict)
    """The experts whose gradient was zero in every step, by the name of a module with stacked experts."""
    small_gradients: dict[str, float] = field(default_factory=dict)
    """By parameter with a small gradient: its largest size, relative to the largest size of any parameter. The size of
    a gradient is the root mean square of its elements."""
    is_double: bool = False
    """True if the rung computes in float64."""
    fixed_statistics: list[str] = field(default_factory=list)
    """The normalisation layers whose running statistics did not change."""


class CoverageRecorder:
    """Records what the steps of one rung exercise, from the reference.

    `replicas` is the number of replicas among which the recorded microbatches are divided.
    """

    def __init__(self, reference: Reference, *, replicas: int) -> None:
        self._reference, self._replicas = reference, replicas
        self._trained = [name for name, p in reference.model.named_parameters() if p.requires_grad]
        self._counts_by_step: dict[int, dict[str, set[float]]] = {}
        self._microbatches_by_step: dict[int, int] = {}
        self._max_accumulated = self._last_epoch = self._num_updates = 0
        self._num_norms = self._num_clipped = 0
        self._sizes: dict[str, float] = {}  # the largest relative size of each gradient
        self._experts_modules = {  # by parameter with stacked experts: the name of its module
            f"{module_name}.{name}".removeprefix("."): module_name
            for module_name, module in reference.model.named_modules()
            if _has_stacked_experts(module)
            for name, _ in module.named_parameters(recurse=False)
        }
        self._busy_experts: dict[str, Tensor] = {}  # by module: which experts ever had a gradient
        self._learning_rates: set[tuple[float, ...]] = set()
        self._is_double = True
        config = reference.config
        self._has_counts = reference.job.loss_over != "batch" and config.merged_microbatches == 1
        self._statistics = {name: _copy_buffers(norm) for name, norm in norms_with_statistics(reference.model)}

    def record_gradient(self, gradient: ReferenceGradient, *, position: RunPosition, num_microbatches: int) -> None:
        """Record a finite gradient of some or all microbatches of the step at `position`."""
        step = position.step_number
        self._last_epoch = max(self._last_epoch, position.epoch)
        self._max_accumulated = max(self._max_accumulated, -(-num_microbatches // self._replicas))
        self._microbatches_by_step[step] = self._microbatches_by_step.get(step, 0) + num_microbatches
        counts = self._counts_by_step.setdefault(step, {})
        for term, values in (gradient.term_counts or {"loss": gradient.counts}).items():
            counts.setdefault(term, set()).update(values)
        # the reference of local SGD has a gradient of each site, with the name `site/FQN`
        by_name = [(name.rpartition("/")[2], value) for name, value in gradient.total.items()]
        sizes = [(name, euclidean_norm(value) / max(value.numel(), 1) ** 0.5) for name, value in by_name]
        largest = max((size for _, size in sizes), default=0.0) or 1.0
        for name, size in sizes:
            self._sizes[name] = max(self._sizes.get(name, 0.0), size / largest)
        self._is_double = self._is_double and all(value.dtype in _DOUBLE_TYPES for _, value in by_name)
        for name, value in by_name:
            if name in self._experts_modules:
                module_name, busy = self._experts_modules[name], value.reshape(len(value), -1).ne(0).any(1).cpu()
                self._busy_experts[module_name] = busy | self._busy_experts.get(module_name, torch.zeros_like(busy))

    def record_update(self, gradient: Mapping[str, Tensor]) -> None:
        """Record an update with this gradient; the call comes before the optimizers' step."""
        self._num_updates += 1
        groups = [group for optimizer in self._reference.optimizers for group in optimizer.param_groups]
        self._learning_rates.add(tuple(float(group["lr"]) for group in groups))
        max_norm = self._reference.config.max_grad_norm
        if max_norm is None:
            return
        norms: dict[str, list[float]] = {}  # by site of local SGD, each of which clips its own gradient
        for name, value in gradient.items():
            norms.setdefault(name.rpartition("/")[0], []).append(euclidean_norm(value))
        self._num_norms += len(norms)
        self._num_clipped += sum(math.hypot(*values) > max_norm for values in norms.values())

    def as_json(self) -> dict[str, Any]:
        """Return the fields of the `StepCoverage` of the steps so far; empty if there are none."""
        if not self._microbatches_by_step:
            return {}
        reference = self._reference
        return asdict(
            StepCoverage(
                num_updates=self._num_updates,
                num_norms=self._num_norms,
                num_clipped=self._num_clipped,
                num_learning_rates=len(self._learning_rates),
                has_schedule=bool(reference.lr_schedulers),
                has_optimizer_state=any(bool(values) for o in reference.optimizers for values in o.state.values()),
                max_microbatches=max(self._microbatches_by_step.values()),
                max_accumulated=self._max_accumulated,
                has_counts=self._has_counts and max(self._microbatches_by_step.values()) > 1,
                has_unequal_counts=any(len(s) > 1 for terms in self._counts_by_step.values() for s in terms.values()),
                last_epoch=self._last_epoch,
                absent_gradients=[name for name in self._trained if name not in self._sizes],
                zero_gradients=[name for name, size in self._sizes.items() if size == 0.0],
                idle_experts={
                    name: (~busy).nonzero().flatten().tolist()
                    for name, busy in self._busy_experts.items()
                    if busy.any() and not busy.all()
                },
                small_gradients={n: size for n, size in self._sizes.items() if 0.0 < size <= _MAX_RECORDED_SIZE},
                is_double=self._is_double,
                fixed_statistics=[
                    name
                    for name, norm in norms_with_statistics(reference.model)
                    if name in self._statistics
                    and all(map(torch.equal, self._statistics[name], norm.buffers(recurse=False)))
                ],
            )
        )


def coverage_gaps(
    coverages: Sequence[Mapping[str, Any]],
    *,
    plan: ExecutionPlan,
    settings: Settings,
    draws_random_numbers: bool,
    has_dropout_off: bool = False,
    compares_gradients: bool = True,
) -> list[str]:
    """Return a statement about each thing that no compared step exercised.

    `coverages` has the fields of a `StepCoverage` for each rung that compared the layout. `compares_gradients`: a rung
    compares gradients, and not only the weights after an update.
    """
    rungs = [StepCoverage(**coverage) for coverage in coverages if coverage]
    if not rungs:
        return []
    gaps = _layout_gaps(plan, rungs) + _gradient_gaps(plan, rungs) + _batch_gaps(rungs)
    if has_dropout_off:
        gaps.append("dropout: it is off in this comparison, because of sync_bn")
    elif not draws_random_numbers:
        gaps.append("random numbers, such as dropout: another seed gives the same gradient")
    return gaps + _update_gaps(plan, settings, rungs, compares_gradients=compares_gradients)


def _layout_gaps(plan: ExecutionPlan, rungs: Sequence[StepCoverage]) -> list[str]:
    """Return statements about axes of one rank, and about replicas without samples."""
    mesh, has_servers = plan.mesh, bool(plan.update_rule.servers)
    if mesh.ranks == 1 and not has_servers:
        return ["a split over ranks: the layout has one rank"]
    requested = {*plan.asked.sizes} | ({"dp_replicate", "dp_shard"} if plan.asked.kind is LayoutKind.HSDP else set())
    gaps = [f"{axis}: this axis has one rank" for axis in sorted(requested) if mesh.size(axis) == 1]
    num_busy = max(rung.max_microbatches for rung in rungs)
    if num_busy < plan.replicas and not has_servers:
        gaps.append(f"{plan.replicas - num_busy} of {plan.replicas} replicas: no step has samples for them")
    return gaps


def _batch_gaps(rungs: Sequence[StepCoverage]) -> list[str]:
    """Return statements about accumulation and the counts of microbatches."""
    gaps = []
    if all(rung.max_accumulated <= 1 for rung in rungs):
        gaps.append("accumulation: each replica has one microbatch a step")
    if any(rung.has_counts for rung in rungs) and not any(rung.has_unequal_counts for rung in rungs):
        gaps.append("weighting: all microbatches of a step have equal counts, so a wrong weight would not show")
    return gaps


def _gradient_gaps(plan: ExecutionPlan, rungs: Sequence[StepCoverage]) -> list[str]:
    """Return statements about parameters and experts without a gradient, or with one of rounding only.

    A compressed gradient may be zero or small although the gradient is not.
    """
    gaps, is_exact = [], not plan.compression.is_on
    silent = [{*rung.absent_gradients, *(rung.zero_gradients if is_exact else ())} for rung in rungs]
    names = [name for name in rungs[-1].absent_gradients + rungs[-1].zero_gradients if all(name in s for s in silent)]
    if names:
        kind = "without a gradient" if not is_exact else "whose gradient is absent or zero"
        reason = ", as that of an expert without tokens" if any("expert" in name for name in names) else ""
        gaps.append(f"{plural(len(names), 'parameter')} {kind}{reason}: {first_names(names)}")
    if not is_exact:
        return gaps
    for name, experts in rungs[-1].idle_experts.items():
        idle = [e for e in experts if all(e in rung.idle_experts.get(name, ()) for rung in rungs)]
        if idle:
            numbers = first_names([str(e) for e in idle], max_names=_MAX_EXPERTS)
            gaps.append(f"{plural(len(idle), 'expert')} of {name} without tokens, or without a gradient: {numbers}")
    names = _rounding_gradients(rungs)
    if names:
        gaps.append(f"{plural(len(names), 'parameter')} whose gradient is rounding only: {first_names(names)}")
    return gaps


def _rounding_gradients(rungs: Sequence[StepCoverage]) -> list[str]:
    """Return the parameters whose true gradient is zero: its size is that of rounding in both precisions."""
    double, other = [r for r in rungs if r.is_double], [r for r in rungs if not r.is_double]
    if not double or not other:
        return []
    candidates = [name for name, size in double[0].small_gradients.items() if size <= _MAX_ROUNDING_SIZE]
    return [
        name
        for name in candidates
        if name not in {*other[0].absent_gradients, *other[0].zero_gradients}
        and other[0].small_gradients.get(name, 1.0) >= _MIN_ROUNDING_GROWTH * double[0].small_gradients[name]
    ]


def _update_gaps(
    plan: ExecutionPlan, settings: Settings, rungs: Sequence[StepCoverage], *, compares_gradients: bool
) -> list[str]:
    """Return statements about epochs, clipping, optimizer, schedule, loss scale and running statistics.

    The steps of a rung in lockstep include the last one of an epoch, and never one of the second epoch.
    """
    gaps = []
    if not compares_gradients and not any(rung.last_epoch for rung in rungs) and (settings.train.epochs or 2) > 1:
        gaps.append("a second epoch: all compared steps are in the first one (--steps)")
    clips_by_joint_norm = step_rule(plan.update_rule).traits.measures_joint_norm  # otherwise, each stage by its own
    if settings.train.max_grad_norm is not None and clips_by_joint_norm:
        if not any(rung.num_clipped for rung in rungs):
            gaps.append(f"clipping: no gradient norm is above {settings.train.max_grad_norm:g} (train.max_grad_norm)")
        elif not compares_gradients and all(rung.num_clipped == rung.num_norms for rung in rungs):
            gaps.append("a constant factor of the gradient: every step clips, which hides it")
    if all(rung.num_updates <= 1 for rung in rungs) and any(rung.has_optimizer_state for rung in rungs):
        gaps.append("the optimizer's state, such as momentum: the second step is the first to use it")
    if any(rung.has_schedule for rung in rungs) and all(rung.num_learning_rates <= 1 for rung in rungs):
        gaps.append("the schedule of the learning rate: it is constant in these steps")
    if settings.train.precision == "fp16":
        gaps.append("changes of the fp16 loss scale: verify keeps it fixed")
    fixed = rungs[-1].fixed_statistics if plan.update_rule.is_synchronous else []
    fixed = [name for name in fixed if all(name in rung.fixed_statistics for rung in rungs)]
    if fixed:
        gaps.append(f"running statistics that did not change: {first_names(fixed)}")
    return gaps


def _has_stacked_experts(module: nn.Module) -> bool:
    """Return True if the module's own parameters are stacked experts: all have one first dimension."""
    own = [p for _, p in module.named_parameters(recurse=False)]
    is_stacked = any(p.dim() > 2 for p in own) and len({p.shape[:1] for p in own}) == 1
    return is_stacked and not isinstance(module, torch.jit.ScriptModule) and has_routed_forward(module)


def _copy_buffers(module: nn.Module) -> list[Tensor]:
    return [buffer.detach().clone() for buffer in module.buffers(recurse=False)]
