"""Detection of a learning rate schedule that ends too early: it counts epochs, but is stepped once per update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    MultiStepLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

_SMALL_FRACTION = 0.05  # of the run
# If an epoch has at least 8 updates, a schedule that counts updates should last for more updates than twice the number
# of epochs in the run.
_MAX_UPDATES_PER_EPOCH, _MIN_EPOCH_STEPS = 2.0, 8
_NEGLIGIBLE_LR = 1e-3


@dataclass(frozen=True, kw_only=True)
class _Span:
    """The length of a schedule, which ends with the update `end_step`.

    At this update the learning rate reaches its lowest value. The exceptions are `ExponentialLR` and `StepLR`, which
    decrease forever; they end when the learning rate is negligible. `text` is the schedule as written, and `epoch_text`
    is the same schedule in epochs. `lengths` has the option that counts steps (`T_max`, `total_iters` or `step_size`),
    and is empty for other schedules. `is_decay`: the schedule multiplies the rate by `gamma` at every step or at
    certain steps.
    """

    end_step: float
    text: str
    epoch_text: str
    lengths: tuple[int, ...] = ()
    is_decay: bool = False


def schedules_in_epochs(schedules: Sequence[Any], *, total_steps: int | None, epoch_steps: int | None) -> list[str]:
    """Return a warning for each of torch's schedules that reaches its lowest rate suspiciously early.

    A schedule that ends before the run is suspicious in these cases, unless an epoch has only one update:

    - The schedule ends within a small fraction of the run.
    - The run has at least two epochs, and the schedule's option that counts steps equals the number of epochs.
    - The run has at least two epochs of at least 8 updates, and the schedule ends after at most twice as many updates
      as the run has epochs.
    - The run has at least two epochs, the schedule multiplies the rate by `gamma`, and it ends in the first epoch or
      after at most as many updates as the run has epochs.
    """
    if not total_steps:
        return []
    warnings = []
    for schedule in schedules:
        span = _find_span(schedule, f"{epoch_steps:,}".replace(",", "") if epoch_steps else "steps_of_an_epoch")
        if span is not None and _ends_early(span, total_steps=total_steps, epoch_steps=epoch_steps):
            warnings.append(
                f"lr_schedule= is stepped once per update, not once per epoch: {span.text} reaches its lowest rate "
                f"after {math.ceil(span.end_step):,} of {total_steps:,} updates. If you meant epochs: "
                f"lr_schedule=lambda o: torch.optim.lr_scheduler.{span.epoch_text}"
            )
    return warnings


def _ends_early(span: _Span, *, total_steps: int, epoch_steps: int | None) -> bool:
    """Return whether the end of a schedule is suspicious, as `schedules_in_epochs` explains."""
    if span.end_step >= total_steps or epoch_steps == 1:
        return False
    epochs = total_steps / epoch_steps if epoch_steps else 0.0
    if epochs >= 2 and (
        span.lengths == (round(epochs),)
        or ((epoch_steps or 0) >= _MIN_EPOCH_STEPS and span.end_step <= _MAX_UPDATES_PER_EPOCH * epochs)
    ):
        return True
    if span.is_decay and epochs >= 2 and span.end_step <= max(epochs, epoch_steps or 0):
        return True
    return span.end_step <= _SMALL_FRACTION * total_steps


def _find_span(schedule: Any, unit: str) -> _Span | None:
    """Return the span of a schedule that decreases up to its end, or of a sequence's last schedule; else None.

    `unit` is the number of updates per epoch as text, which converts epochs to updates in `epoch_text`.
    """
    kind = type(schedule)
    if kind is SequentialLR:
        last_schedule, start = schedule._schedulers[-1], schedule._milestones[-1]
        inner = _find_span(last_schedule, unit)
        return inner and _Span(end_step=start + inner.end_step, text=inner.text, epoch_text=inner.epoch_text)
    if kind is CosineAnnealingLR:
        minimum = f", eta_min={schedule.eta_min:g}" if schedule.eta_min else ""
        return _make_span(kind, schedule.T_max, f"T_max={schedule.T_max}", f" * {unit}", minimum, (schedule.T_max,))
    if kind is PolynomialLR:
        power = f", power={schedule.power:g}" if schedule.power != 1 else ""
        count = schedule.total_iters
        return _make_span(kind, count, f"total_iters={count}", f" * {unit}", power, (count,))
    gamma = getattr(schedule, "gamma", 1.0)
    if kind not in (StepLR, MultiStepLR, ExponentialLR) or not 0 <= gamma < 1:
        return None
    num_decays = math.log(_NEGLIGIBLE_LR) / math.log(gamma) if gamma else 1.0
    if kind is ExponentialLR:
        scaled = f"ExponentialLR(o, {gamma:g} ** (1 / {unit}))"
        return _Span(end_step=num_decays, text=f"ExponentialLR(gamma={gamma:g})", epoch_text=scaled, is_decay=True)
    if kind is StepLR:
        size = schedule.step_size
        span = _make_span(
            kind, size * math.ceil(num_decays), f"step_size={size}", f" * {unit}", f", gamma={gamma:g}", (size,)
        )
        return replace(span, is_decay=True)
    milestones = sorted(schedule.milestones)
    if not milestones:
        return None
    scaled = f"MultiStepLR(o, [n * {unit} for n in {milestones}], gamma={gamma:g})"
    text = f"MultiStepLR(milestones={milestones}, gamma={gamma:g})"
    return _Span(end_step=milestones[-1], text=text, epoch_text=scaled, is_decay=True)


def _make_span(
    kind: type, end_step: float, first_option: str, factor: str, options: str, lengths: tuple[int, ...]
) -> _Span:
    """Return the span of a schedule of this class, from the texts of its options.

    `first_option` counts steps, `factor` converts this option from epochs to steps, and `options` are all others.
    """
    name = kind.__name__
    return _Span(
        end_step=end_step,
        text=f"{name}({first_option}{options})",
        epoch_text=f"{name}(o, {first_option}{factor}{options})",
        lengths=lengths,
    )
