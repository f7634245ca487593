"""Error margins of a forecast, in bytes and in seconds; a difference within them is `tight`, or a tie.

The numbers come from the benchmarks: closed forms of bytes are 4.3 % off replays on average, replays are at most 2.1 %
off the allocator, and the resident size of a process on CPUs is 6 % off on average. Closed forms of seconds are 10.6 %
off on average, timed steps 2.2 %.
"""

from math import sqrt

from paceline.planner.cost.estimate import Estimate, MeasuredTime
from paceline.planner.cost.memory import Memory
from paceline.planner.hardware.cluster import Device

RECKONED_BYTES = 0.05
REPLAYED_BYTES = 0.02
PROCESS_BYTES = 0.06
RECKONED_SECONDS = 0.10
TIMED_SECONDS = 0.02
_MEDIAN = 1.86  # error of a median of n steps = _MEDIAN × spread / √n
_SURE = 2  # times that error


def bytes_margin(memory: Memory, device: Device, *, is_replayed: bool) -> float:
    """Return the error margin of the peak, in bytes.

    An accelerator's reserve is not a forecast, so it has no margin. On CPUs the whole process counts, as the kernel
    sees it.
    """
    if not device.is_accelerator:
        return PROCESS_BYTES * memory.peak_bytes
    return (REPLAYED_BYTES if is_replayed else RECKONED_BYTES) * (memory.peak_bytes - memory.reserve)


def seconds_error(one: Estimate, quickest: Estimate) -> float:
    """Return the relative error of the ratio of two step times.

    An untimed layout does not tie with a timed `quickest`: a forecast does not overrule a measurement.
    """
    if quickest.timed is None:
        return RECKONED_SECONDS
    if one.timed is None:
        return 0.0
    return max(TIMED_SECONDS, _SURE * sqrt(_variance(one.timed) + _variance(quickest.timed)))


def is_tie(one: Estimate, quickest: Estimate) -> bool:
    """Return True if the forecast cannot tell that `quickest` is faster than `one`."""
    return one.step_seconds <= (1 + seconds_error(one, quickest)) * quickest.step_seconds


def _variance(timed: MeasuredTime) -> float:
    """Return the squared relative error of the median; with no spread measured, that of a forecast."""
    error = _MEDIAN * timed.spread / sqrt(timed.steps) if timed.spread else RECKONED_SECONDS
    return error * error
