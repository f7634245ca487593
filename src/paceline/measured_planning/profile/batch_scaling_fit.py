"""Fit how a measured cost depends on the number of samples and on their length: fixed, linear and quadratic terms."""

from collections.abc import Sequence

from paceline.measured_planning.profile.sample_batches import FEW_SAMPLES, MORE_SAMPLES
from paceline.planner.model_costs.model_profile import BatchScaling

_MIN_RELATIVE_SIZE = 1e-3  # a smaller fraction of the cost is taken for a rounding error


def fit_batch_scaling(values: Sequence[float], length: int | None) -> BatchScaling:
    """Return a cost as a function of samples and length, fitted to measured values.

    `values` are the cost of few samples, of more samples, and of few samples of half and of a quarter of the length.
    The function has no term for a cost that all samples share and that grows with the length. For such a cost, the
    function is exact at this length only.
    """
    per_sample = (values[1] - values[0]) / (MORE_SAMPLES - FEW_SAMPLES)
    fixed = values[0] - FEW_SAMPLES * per_sample
    if abs(fixed) < _MIN_RELATIVE_SIZE * abs(values[0]):
        per_sample, fixed = values[0] / FEW_SAMPLES, 0.0
    if per_sample < 0 or fixed < 0:  # a negative term would forecast less than was measured
        per_sample, fixed = (
            max(value / count for value, count in zip(values, (FEW_SAMPLES, MORE_SAMPLES), strict=False)),
            0.0,
        )
    if length is None or len(values) < 4:
        return (
            BatchScaling(fixed=fixed, token=per_sample / length)
            if length
            else BatchScaling(fixed=fixed, sample=per_sample)
        )
    half, quarter = ((value - fixed) / FEW_SAMPLES for value in values[2:4])
    half_length, quarter_length = length // 2, length // 4
    upper_slope, lower_slope = (
        (per_sample - half) / (length - half_length),
        (half - quarter) / (half_length - quarter_length),
    )
    pair = (upper_slope - lower_slope) / (length - quarter_length)
    token = upper_slope - pair * (length + half_length)
    if abs(pair) * length * length < _MIN_RELATIVE_SIZE * abs(per_sample):
        pair, token = 0.0, upper_slope
    sample = per_sample - length * (token + length * pair)
    if abs(sample) < _MIN_RELATIVE_SIZE * abs(per_sample):
        sample = 0.0
    if min(half, quarter, pair, sample + token + pair) < 0:
        return BatchScaling(fixed=fixed, token=per_sample / length)
    return BatchScaling(fixed=fixed, sample=sample, token=token, pair=pair)
