"""How far off a forecast may be, in bytes and in seconds: what lies within that is `tight`, or a tie.

The numbers are what the benchmarks found: closed forms of bytes are 4.3 % off replays on average, replays 2.1 % off the
allocator at most, and what a process on CPUs has resident is 6 % off on average. Closed forms of seconds are 10.6 % off
on average, steps that were timed 2.2 %.
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
_MEDIAN = 1.86  # the error of a median of n steps is so many times their spread, divided by the root of n
_SURE = 2  # times that error


def bytes_margin(memory: Memory, device: Device, *, is_replayed: bool) -> float:
    """Return by how many bytes the peak may be off.

    The reserve of an accelerator is no forecast; on CPUs the whole process counts, as the kernel sees it.
    """
    if not device.is_accelerator:
        return PROCESS_BYTES * memory.peak_bytes
    return (REPLAYED_BYTES if is_replayed else RECKONED_BYTES) * (memory.peak_bytes - memory.reserve)


def seconds_error(one: Estimate, quickest: Estimate) -> float:
    """Return by what part of 1 the ratio of their seconds may be off.

    What was timed is a tie with nothing that was not: a forecast does not overrule a clock.
    """
    if quickest.timed is None:
        return RECKONED_SECONDS
    if one.timed is None:
        return 0.0
    return max(TIMED_SECONDS, _SURE * sqrt(_variance(one.timed) + _variance(quickest.timed)))


def is_tie(one: Estimate, quickest: Estimate) -> bool:
    """Return whether no forecast can tell that the second is quicker."""
    return one.step_seconds <= (1 + seconds_error(one, quickest)) * quickest.step_seconds


def _variance(timed: MeasuredTime) -> float:
    """Return that of the median, as a part of it; of too few steps to tell it is taken as a forecast's."""
    error = _MEDIAN * timed.spread / sqrt(timed.steps) if timed.spread else RECKONED_SECONDS
    return error * error
