"""Detection of spikes: steps whose loss or gradient norm is far above the last values.

A spike is a value that lies more than `sigma` robust standard deviations above the median of the last steps. The robust
standard deviation is 1.4826 times the median absolute deviation (Leys et al., "Detecting outliers", 2013), so that
earlier spikes do not widen it. All ranks decide the same, because loss and norm are those of the global batch.
"""

import math
from collections.abc import Sequence
from statistics import median

_WINDOW, _MIN_VALUES = 64, 16  # steps that a value is compared with; no decision with fewer
_SIGMA_PER_DEVIATION = 1.4826  # of a normal distribution
_MIN_RELATIVE_SIGMA = 0.01  # of the median, for losses that hardly change


class SpikeDetector:
    """The detector of one run. `history` has the loss and the gradient norm of the last steps that were no spikes.

    `history` is saved with checkpoints, so that a resumed run decides as an uninterrupted one.
    """

    def __init__(self, *, sigma: float, skips: bool) -> None:
        self.skips = skips
        self.history: list[list[float]] = []
        self._sigma = sigma

    def judge(self, loss: float, grad_norm: float | None) -> str:
        """Return a description of the spike, or an empty text if the step is none.

        A value that is not finite is no spike: the finite check, or under fp16 the loss scaler, decides about it.
        """
        if not math.isfinite(loss) or not math.isfinite(grad_norm or 0.0):
            return ""
        norm = math.log(grad_norm) if grad_norm else 0.0
        if len(self.history) >= _MIN_VALUES:
            for name, value, index in (("loss", loss, 0), ("gradient norm", norm, 1)):
                earlier = [values[index] for values in self.history]
                distance = robust_distance(value, earlier)
                if distance > self._sigma:
                    shown = [math.exp(v) for v in (value, median(earlier))] if index else [value, median(earlier)]
                    return f"the {name} is {shown[0]:.6g}, {distance:.3g} sigma above the median {shown[1]:.6g}"
        self.history.append([loss, norm])
        del self.history[:-_WINDOW]
        return ""


def robust_distance(value: float, earlier: Sequence[float]) -> float:
    """Return how many robust standard deviations `value` lies above the median of the earlier values."""
    center = median(earlier)
    deviation = median(abs(other - center) for other in earlier)
    sigma = max(_SIGMA_PER_DEVIATION * deviation, _MIN_RELATIVE_SIGMA * abs(center), 1e-12)
    return (value - center) / sigma
