"""Detection of spikes: steps whose loss or gradient norm is far above the last values.

A spike is a value that lies more than `sigma` robust standard deviations above the median of the last steps. The robust
standard deviation is 1.4826 times the median absolute deviation (Leys et al., "Detecting outliers", 2013), so that
earlier spikes do not widen it. All ranks decide the same, because loss and norm are those of the global batch.
"""

import math
from collections.abc import Sequence
from statistics import median

import torch

from paceline.comm.process_group import World

_WINDOW, _MIN_VALUES = 64, 16  # steps that a value is compared with; no decision with fewer
_SIGMA_PER_DEVIATION = 1.4826  # of a normal distribution
_MIN_RELATIVE_SIGMA = 0.01  # of the median, for losses that hardly change
_MIN_LOG_SIGMA = 0.01  # the same for gradient norms, whose logarithms are compared
_TINY = 1e-12


class SpikeDetector:
    """The detector of one run. `history` has the loss and the logarithm of the gradient norm of the last steps.

    `history` is saved with checkpoints, so that a resumed run decides as an uninterrupted one.
    """

    def __init__(self, *, sigma: float, skips: bool, world: World) -> None:
        self.skips = skips
        self._world = world
        self.history: list[list[float | None]] = []
        self.num_in_a_row = 0  # of spikes that were skipped
        self._sigma = sigma

    def judge_jointly(self, loss: float, grad_norm: float | None) -> str:
        """Return a description of the spike if any rank finds one, or an empty text. Every rank must call this."""
        description = self.judge(loss, grad_norm)
        verdict = torch.tensor([float(bool(description))], device=self._world.device)
        if not float(self._world.all_reduce(verdict, op="max")):
            self.num_in_a_row = 0
            return ""
        self.num_in_a_row += 1
        return description or f"another rank reports a spike (here, the loss is {loss:.6g})"

    def judge(self, loss: float, grad_norm: float | None) -> str:
        """Return a description of the spike, or an empty text if the step is none.

        A value that is not finite is no spike: the finite check, or under fp16 the loss scaler, decides about it.
        """
        if not math.isfinite(loss) or not math.isfinite(grad_norm or 0.0):
            return ""
        log_norm = math.log(grad_norm) if grad_norm else None
        losses = [values[0] for values in self.history if values[0] is not None]
        log_norms = [values[1] for values in self.history if values[1] is not None]
        distance = robust_distance(loss, losses, smallest_sigma=_smallest_sigma(losses))
        if distance > self._sigma:
            return f"the loss is {loss:.6g}, {distance:.3g} sigma above the median {median(losses):.6g}"
        distance = 0.0 if log_norm is None else robust_distance(log_norm, log_norms, smallest_sigma=_MIN_LOG_SIGMA)
        if distance > self._sigma:
            usual = math.exp(median(log_norms))
            return f"the gradient norm is {grad_norm:.6g}, {distance:.3g} sigma above the median {usual:.6g}"
        self.history.append([loss, log_norm])
        del self.history[:-_WINDOW]
        return ""


def _smallest_sigma(losses: Sequence[float]) -> float:
    return max(_MIN_RELATIVE_SIGMA * abs(median(losses)), _TINY) if losses else _TINY


def robust_distance(value: float, earlier: Sequence[float], *, smallest_sigma: float) -> float:
    """Return how many robust standard deviations `value` lies above the median of the earlier values.

    The standard deviation is at least `smallest_sigma`. The result is 0 if there are too few earlier values.
    """
    if len(earlier) < _MIN_VALUES:
        return 0.0
    center = median(earlier)
    deviation = median(abs(other - center) for other in earlier)
    sigma = max(_SIGMA_PER_DEVIATION * deviation, smallest_sigma)
    return (value - center) / sigma
