"""Compute the error margins of a forecast.

A layout is `tight` if the difference between its peak and the limit is within the margin. Two layouts tie if the
difference between their step times is within the margin.

The constants follow from mean errors in the benchmarks: 4.3 % for the bytes of closed forms relative to replays, 2.1 %
at most for replays relative to the allocator, 6 % for the resident size of a process on CPUs, 10.6 % for the seconds of
closed forms and 2.2 % for timed steps.
"""

from math import sqrt

from paceline.planner.cost.estimate import Estimate, MeasuredTime
from paceline.planner.cost.memory import Memory
from paceline.planner.hardware.cluster import Device

FORECAST_BYTES_ERROR = 0.05
REPLAY_BYTES_ERROR = 0.02
PROCESS_BYTES_ERROR = 0.06
FORECAST_SECONDS_ERROR = 0.10
TIMED_SECONDS_ERROR = 0.02
_MEDIAN_ERROR = 1.86  # error of a median of n steps = _MEDIAN_ERROR × spread / √n
_NUM_SIGMAS = 2  # the error of a ratio of medians, in standard deviations


def bytes_margin(memory: Memory, device: Device, *, is_replayed: bool) -> float:
    """Return the error margin of the peak, in bytes.

    On an accelerator, the reserve has no margin, because it is not a forecast. On CPUs, the margin applies to the
    resident size of the whole process.
    """
    if not device.is_accelerator:
        return PROCESS_BYTES_ERROR * memory.peak_bytes
    return (REPLAY_BYTES_ERROR if is_replayed else FORECAST_BYTES_ERROR) * (memory.peak_bytes - memory.reserve)


def seconds_error(estimate: Estimate, fastest: Estimate) -> float:
    """Return the relative error of the ratio of two step times.

    An untimed layout never ties with a timed `fastest`, because a forecast does not overrule a measurement.
    """
    if fastest.measured_time is None:
        return FORECAST_SECONDS_ERROR
    if estimate.measured_time is None:
        return 0.0
    return max(
        TIMED_SECONDS_ERROR, _NUM_SIGMAS * sqrt(_variance(estimate.measured_time) + _variance(fastest.measured_time))
    )


def is_tie(estimate: Estimate, fastest: Estimate) -> bool:
    """Return True if the difference of the step times of `estimate` and `fastest` is within their error."""
    return estimate.step_seconds <= (1 + seconds_error(estimate, fastest)) * fastest.step_seconds


def _variance(measured_time: MeasuredTime) -> float:
    """Return the squared relative error of the median or, without a measured spread, of a forecast."""
    error = (
        _MEDIAN_ERROR * measured_time.spread / sqrt(measured_time.steps)
        if measured_time.spread
        else FORECAST_SECONDS_ERROR
    )
    return error * error
