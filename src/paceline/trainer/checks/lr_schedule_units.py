"""Detection of a learning rate schedule that was meant in epochs but is stepped once per update: it ends too early."""

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

_SMALL_SHARE = 0.05
_FEW, _MANY = 2.0, 8  # a schedule in updates lasts longer than 2 updates per epoch if an epoch has 8 or more
_NOTHING_LEFT = 1e-3


@dataclass(frozen=True, kw_only=True)
class _Span:
    """The update `end_step` after which a schedule is constant; `text` is the schedule, `epoch_text` that in epochs.

    `is_decay`: each step of the schedule multiplies the rate, which is negligible at its end.
    """

    end: float
    written: str
    scaled: str
    counts: tuple[int, ...] = ()
    falls: bool = False


def schedules_in_epochs(schedules: Sequence[Any], *, total_steps: int | None, epoch_steps: int | None) -> list[str]:
    """Return a warning for each of torch's schedules that reaches its lowest rate suspiciously early.

    That is within a small share of the run, after as many updates as the run has epochs, after at most two updates for
    each epoch, or, if it multiplies the rate at each of its steps, within the first epoch.
    """
    if not total_steps:
        return []
    found = []
    for schedule in schedules:
        span = _span(schedule, f"{epoch_steps:,}".replace(",", "") if epoch_steps else "steps_of_an_epoch")
        if span is not None and _is_short(span, total_steps=total_steps, epoch_steps=epoch_steps):
            found.append(
                f"lr_schedule= is stepped once per update, not once per epoch: {span.written} reaches its lowest rate "
                f"after {math.ceil(span.end):,} of {total_steps:,} updates. If you meant epochs: "
                f"lr_schedule=lambda o: torch.optim.lr_scheduler.{span.scaled}"
            )
    return found


def _is_short(span: _Span, *, total_steps: int, epoch_steps: int | None) -> bool:
    if span.end >= total_steps or epoch_steps == 1:
        return False
    epochs = total_steps / epoch_steps if epoch_steps else 0.0
    if epochs >= 2 and (span.counts == (round(epochs),) or ((epoch_steps or 0) >= _MANY and span.end <= _FEW * epochs)):
        return True
    if span.falls and epochs >= 2 and span.end <= max(epochs, epoch_steps or 0):
        return True
    return span.end <= _SMALL_SHARE * total_steps


def _span(schedule: Any, unit: str) -> _Span | None:
    """Return the span of a schedule that only decreases, or of a sequence's last part; None for all others."""
    kind = type(schedule)
    if kind is SequentialLR:
        last, begin = schedule._schedulers[-1], schedule._milestones[-1]
        inner = _span(last, unit)
        return inner and _Span(end=begin + inner.end, written=inner.written, scaled=inner.scaled)
    if kind is CosineAnnealingLR:
        floor = f", eta_min={schedule.eta_min:g}" if schedule.eta_min else ""
        return _of(kind, schedule.T_max, f"T_max={schedule.T_max}", f" * {unit}", floor, (schedule.T_max,))
    if kind is PolynomialLR:
        power = f", power={schedule.power:g}" if schedule.power != 1 else ""
        count = schedule.total_iters
        return _of(kind, count, f"total_iters={count}", f" * {unit}", power, (count,))
    gamma = getattr(schedule, "gamma", 1.0)
    if kind not in (StepLR, MultiStepLR, ExponentialLR) or not 0 <= gamma < 1:
        return None
    falls = math.log(_NOTHING_LEFT) / math.log(gamma) if gamma else 1.0
    if kind is ExponentialLR:
        scaled = f"ExponentialLR(o, {gamma:g} ** (1 / {unit}))"
        return _Span(end=falls, written=f"ExponentialLR(gamma={gamma:g})", scaled=scaled, falls=True)
    if kind is StepLR:
        size = schedule.step_size
        found = _of(kind, size * math.ceil(falls), f"step_size={size}", f" * {unit}", f", gamma={gamma:g}", (size,))
        return replace(found, falls=True)
    stones = sorted(schedule.milestones)
    if not stones:
        return None
    scaled = f"MultiStepLR(o, [n * {unit} for n in {stones}], gamma={gamma:g})"
    written = f"MultiStepLR(milestones={stones}, gamma={gamma:g})"
    return _Span(end=stones[-1], written=written, scaled=scaled, falls=True)


def _of(kind: type, end: float, count: str, times: str, rest: str, counts: tuple[int, ...]) -> _Span:
    name = kind.__name__
    return _Span(end=end, written=f"{name}({count}{rest})", scaled=f"{name}(o, {count}{times}{rest})", counts=counts)
