"""The optimizer update: unscale gradients, measure the norm, clip, step, advance LR schedulers, update the EMA."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import JobError, NonFiniteError, SpikeError
from paceline.parallel.gradients.joint_grad_norm import joint_norm
from paceline.parallel.gradients.partition import do_nothing
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.step.spike_detector import SpikeDetector
from paceline.step.step_totals import StepResult
from paceline.torch_internals.private_api import lerp_all

GradNormFunction = Callable[[], Tensor]
# The smallest item size, in bytes, of a gradient whose norm is computed in the gradient's own dtype. A norm in half
# precision has only three digits, so each rank would clip its shard by a different norm.
_MIN_NORM_ITEMSIZE = 4
_MAX_SKIPS_IN_A_ROW = 10  # more spikes mean that the loss has changed for good


class Ema:
    """An exponential moving average (Polyak and Juditsky, 1992) of the weights that this rank holds.

    `after_swap` is called after the weights were exchanged with the average.
    """

    def __init__(
        self, *, weights: Mapping[str, Tensor], decay: float, after_swap: Callable[[], None] = do_nothing
    ) -> None:
        self.decay = decay
        self.names = list(weights)
        self.weights = list(weights.values())
        self.averages = [tensor.detach().clone() for tensor in self.weights]
        self._after_swap = after_swap

    def update(self) -> None:
        """Move the average towards the weights by `1 - decay`."""
        lerp_all(self.averages, self.weights, 1.0 - self.decay)

    def swap(self) -> None:
        """Exchange the average and the weights; a second call undoes the first."""
        with torch.no_grad():
            for average, live in zip(self.averages, self.weights, strict=True):
                copy = live.detach().clone()
                live.copy_(average)
                average.copy_(copy)
        self._after_swap()

    @contextmanager
    def use_averages(self) -> Iterator[None]:
        """Return a context in which the model has the averaged weights. The exit restores the weights bit for bit."""
        self.swap()
        try:
            yield
        finally:
            self.swap()


NonFiniteTerms = tuple[tuple[int, str], ...]
"""The (microbatch index, term name) pairs whose loss is not finite."""


class OptimizerUpdate:
    """The optimizers, LR schedulers, loss scaler and EMA of a step, with gradient clipping and the finite check.

    `joint_grad_norm` measures the gradient norm over all ranks. `sync_after_update` sends updated weights to the ranks
    that hold copies. `on_update` is the job's function of that name, called with the step. `on_empty` is the setting
    for loss terms without a target, "stop" or "zero". With a `spike_detector`, a step that is a spike is skipped, or
    ends the run.
    """

    def __init__(
        self,
        *,
        named_parameters: Sequence[NamedParameter],
        optimizers: Sequence[Optimizer],
        lr_schedulers: Sequence[Any],
        scaler: "torch.amp.GradScaler | None",
        max_grad_norm: float | None,
        check_finite: bool,
        skip_nonfinite: bool,
        ema: Ema | None,
        joint_grad_norm: GradNormFunction | None = None,
        sync_after_update: Callable[[], None] = do_nothing,
        on_update: Callable[[int], object] | None = None,
        on_empty: str = "stop",
        rolls_back: bool = False,
        spike_detector: SpikeDetector | None = None,
    ) -> None:
        self.optimizers = list(optimizers)
        self.lr_schedulers = list(lr_schedulers)
        self.scaler = scaler
        self.ema = ema
        self.named_parameters = list(named_parameters)
        self.on_empty = on_empty
        self._max_grad_norm = max_grad_norm
        self._checks_finite = check_finite
        self._skips_nonfinite = skip_nonfinite
        self._rolls_back = rolls_back
        self.spike_detector = spike_detector
        self._joint_grad_norm = joint_grad_norm
        self._update_hooks = [] if sync_after_update is do_nothing else [sync_after_update]
        self._on_update = on_update
        self.lr = self.optimizers[0].param_groups[0]["lr"]  # of the last update, before the LR schedulers advanced

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that this rank updates."""
        return [member.parameter for member in self.named_parameters]

    @property
    def skips_nonfinite(self) -> bool:
        """True if a step that is not finite is skipped. For that, its loss must be known before the update."""
        return self._checks_finite and self._skips_nonfinite

    @property
    def needs_loss_before_update(self) -> bool:
        """True if the update depends on the loss, so that a GPU must wait for it in each step."""
        return self.skips_nonfinite or self._rolls_back or self.spike_detector is not None

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss that backward runs on: under fp16, multiplied by the loss scale."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def commit(
        self,
        *,
        step: int,
        loss: float | None,
        counts: Mapping[str, float] | None = None,
        nonfinite_terms: NonFiniteTerms = (),
        steps_lr_schedulers: bool = True,
    ) -> tuple[Tensor | None, bool]:
        """Update the weights. Return the gradient norm, if it was measured, and False if the update was skipped.

        If `loss` is None, it is not known yet, and the caller runs the finite check one step later. If
        `steps_lr_schedulers` is False, the caller advances the LR schedulers.

        Raises:
            NonFiniteError: the loss or a gradient is not finite, and the run is set to stop on that.
            SpikeError: the step is a spike, and the run is set to stop on that.
        """
        self._unscale()
        gradients = [stored_values(p.grad) for p in (m.parameter for m in self.named_parameters) if p.grad is not None]
        grad_norm = self._measure_norm(gradients)
        if loss is not None and self._checks_finite and not self._is_finite(loss, grad_norm):
            if not self._skips_nonfinite:
                raise self.nonfinite_error(step=step, loss=loss, counts=counts, nonfinite_terms=nonfinite_terms)
            self._finish_update(steps_lr_schedulers)
            return grad_norm, False
        if loss is not None and self.spike_detector is not None and self._is_spike(step, loss, grad_norm):
            self._finish_update(steps_lr_schedulers)
            return grad_norm, False
        if self._max_grad_norm is not None and grad_norm is not None:
            self._clip(gradients, grad_norm, max_norm=self._max_grad_norm)
        self.lr = self.optimizers[0].param_groups[0]["lr"]
        self._step_optimizers(step)
        self._finish_update(steps_lr_schedulers)
        return grad_norm, True

    def step_lr_schedulers(self) -> None:
        """Advance the LR schedulers by one step, whether or not the update was applied."""
        for lr_scheduler in self.lr_schedulers:
            step_lr_scheduler(lr_scheduler)

    def refuse_empty_batch(self, *, step: int, loss: float, counts: Mapping[str, float]) -> None:
        """Refuse a global batch in which a loss term has no target. A microbatch without a target is accepted.

        Raises:
            NonFiniteError: the count of a term is zero, and the run is set to stop on that.
        """
        if 0 in counts.values() and not self.skips_nonfinite and self.on_empty == "stop":
            raise self.nonfinite_error(step=step, loss=loss, counts=counts)

    def nonfinite_error(
        self, *, step: int, loss: float, counts: Mapping[str, float] | None = None, nonfinite_terms: NonFiniteTerms = ()
    ) -> NonFiniteError:
        """Return the error for a step that is not finite.

        It names the loss terms whose count is zero. Without such a term, it names the first non-finite gradients.
        """
        error = self._make_nonfinite_error(step, loss, counts or {})
        error.step, error.nonfinite_terms = step, nonfinite_terms
        return error

    def _make_nonfinite_error(self, step: int, loss: float, counts: Mapping[str, float]) -> NonFiniteError:
        empty_terms = [name for name, count in counts.items() if count == 0]
        if empty_terms:
            error = NonFiniteError(
                f"step {step}: the count of {', '.join(empty_terms)} is 0 over the whole global batch.",
                cause="every target of the batch is masked, as may happen in a short last batch",
                hint="--train.on_empty zero counts such a term as zero; --train.on_nonfinite skip skips the step",
            )
            error.no_target = self.on_empty == "stop"
            return error
        nonfinite_names = [
            member.name
            for member in self.named_parameters
            if member.parameter.grad is not None
            and not bool(torch.isfinite(stored_values(member.parameter.grad)).all())
        ]
        shown = ", ".join(nonfinite_names[:3]) + (
            f" and {len(nonfinite_names) - 3} more" if len(nonfinite_names) > 3 else ""
        )
        where = f"gradients are not finite in {shown}" if nonfinite_names else "every gradient is finite"
        return NonFiniteError(
            f"step {step}: loss is {loss}, {where}"
            f"{'' if nonfinite_names or not math.isfinite(loss) else ', but their norm is not'}.",
            cause="a learning rate that is too high, inputs that are not finite, or a division "
            "by zero in model or loss",
            hint="--train.on_nonfinite skip or rollback, or --train.max_grad_norm 1.0",
        )

    def _clip(self, gradients: Sequence[Tensor], norm: Tensor, *, max_norm: float) -> None:
        parameters = self.parameters
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            for gradient in gradients:
                gradient.mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        else:
            nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)

    def _measure_norm(self, gradients: Sequence[Tensor]) -> Tensor | None:
        """Return the gradient norm. On a CPU, a norm that overflows is recomputed in float64.

        A GPU is not checked for an overflow, because the check would wait for the device.
        """
        if self._max_grad_norm is None and not self._checks_finite:
            return None
        if self._joint_grad_norm is not None:
            return self._joint_grad_norm()
        if not gradients:
            return None
        if any(gradient.dtype.itemsize < _MIN_NORM_ITEMSIZE for gradient in gradients):
            return joint_norm(gradients, worlds=[])
        norm = nn.utils.get_total_norm(gradients)
        if norm.device.type == "cpu" and not math.isfinite(norm.item()):
            return _float64_norm(gradients, fallback=norm)
        return norm

    @staticmethod
    def _is_finite(loss: float, norm: Tensor | None) -> bool:
        return math.isfinite(loss) and (norm is None or math.isfinite(norm.item()))

    def _is_spike(self, step: int, loss: float, norm: Tensor | None) -> bool:
        """Return whether the step is a spike that is to be skipped."""
        assert self.spike_detector is not None
        spike = self.spike_detector.judge_jointly(loss, None if norm is None else norm.item())
        too_many = self.spike_detector.num_in_a_row > _MAX_SKIPS_IN_A_ROW
        if spike and (too_many or not self.spike_detector.skips):
            raise SpikeError(
                f"step {step}: {spike}{f', after {_MAX_SKIPS_IN_A_ROW} skipped steps in a row' if too_many else ''}.",
                cause="a bad batch, or a learning rate that is too high",
                hint="--train.on_spike skip or rollback; a larger --train.spike_sigma if this is usual",
            )
        return bool(spike)

    def _unscale(self) -> None:
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)

    def _step_optimizers(self, step: int) -> None:
        """Step the optimizers. Then send the new weights, call the job's `on_update` and update the EMA."""
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        for hook in self._update_hooks:
            hook()
        if self._on_update is not None:
            with torch.no_grad():
                self._on_update(step)
        if self.ema is not None:
            self.ema.update()

    def _finish_update(self, steps_lr_schedulers: bool) -> None:
        if self.scaler is not None:
            self.scaler.update()
        if steps_lr_schedulers:
            self.step_lr_schedulers()


def step_lr_scheduler(lr_scheduler: Any) -> None:
    """Advance an LR scheduler by one step.

    Raises:
        JobError: the LR scheduler has no more steps.
    """
    try:
        lr_scheduler.step()
    except ValueError as error:
        raise lr_scheduler_error(lr_scheduler, cause=str(error).partition("\n")[0]) from error


def lr_scheduler_error(lr_scheduler: Any, *, cause: str) -> JobError:
    """Return the error for an LR scheduler that ends before the run does."""
    return JobError(
        f"lr_schedule= returned {type(lr_scheduler).__name__}, which ends before the run does.",
        cause=cause,
        hint="give lr_schedule= as many steps as the run has (--train.steps), or a schedule without an end",
    )


class DeferredFiniteCheck:
    """The finite check on GPUs. It checks each step one step later, when the result has arrived on the host."""

    def __init__(self, update: OptimizerUpdate) -> None:
        self._update = update
        self._last: StepResult | None = None

    def check(self, result: StepResult) -> None:
        """Check the result of the previous call, and store `result` for the next call.

        Raises:
            NonFiniteError: the loss or a gradient of the previous step was not finite.
        """
        previous, self._last = self._last, result
        self._check(previous)

    def check_last_step(self) -> None:
        """Check the last step now, for example before its weights are saved.

        Raises:
            NonFiniteError: the loss or a gradient of the last step was not finite.
        """
        last, self._last = self._last, None
        self._check(last)

    def _check(self, last: StepResult | None) -> None:
        if last is not None and not last.is_finite:
            totals = last.totals
            raise self._update.nonfinite_error(
                step=last.step, loss=last.loss, counts=totals.counts, nonfinite_terms=totals.nonfinite_terms
            )


def stored_values(tensor: Tensor) -> Tensor:
    """Return the nonzero values of a sparse tensor, which must be coalesced, or a dense tensor itself."""
    return tensor.values() if tensor.is_sparse else tensor


def _float64_norm(gradients: Sequence[Tensor], *, fallback: Tensor) -> Tensor:
    """Return the norm in float64, computed after division by the largest absolute value.

    If the largest value is not finite, return `fallback`.
    """
    largest = torch.stack([torch.linalg.vector_norm(g, math.inf).double() for g in gradients if g.numel()]).max()
    if not math.isfinite(largest.item()):
        return fallback
    norms = [torch.linalg.vector_norm(g / largest).double() for g in gradients]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms)) * largest
    return norm
