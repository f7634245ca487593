"""Detect CPU contention: whether other programs used the cores while this run's ranks measured something."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import psutil

from paceline.comm.process_group import World

# Fractions of the cores' time. Other programs disturb a measurement if they use at least _MIN_OTHER_SHARE of this time,
# and at most _MAX_IDLE_SHARE of this time is idle.
_MIN_OTHER_SHARE, _MAX_IDLE_SHARE = 0.1, 0.2
_MIN_SECONDS = 0.2  # summed over the cores: shorter periods are too coarse, as the kernel counts in 10 ms steps
# The fields of psutil.cpu_times() that count as work. Interrupts do not, because the ranks' own messages cause them.
_WORK_FIELDS = ("user", "nice", "system", "steal")


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """CPU seconds so far or, as a difference of two readings, in a period.

    `work` and `idle` are sums over the usable cores of `machine`. `own` are those of this process and its children.
    """

    machine: str
    work: float
    idle: float
    own: float

    def difference_from(self, earlier: "CpuTimes") -> "CpuTimes":
        """Return the CPU seconds between an earlier reading and this one."""
        work, idle, own = self.work - earlier.work, self.idle - earlier.idle, self.own - earlier.own
        return CpuTimes(machine=self.machine, work=work, idle=idle, own=own)


def read_cpu_times() -> CpuTimes:
    """Return the CPU seconds until now."""
    all_cores = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(all_cores))
    cores = [all_cores[core] for core in usable if core < len(all_cores)]
    return CpuTimes(
        machine=socket.gethostname(),
        work=sum(getattr(core, name, 0.0) for core in cores for name in _WORK_FIELDS),
        idle=sum(core.idle + getattr(core, "iowait", 0.0) for core in cores),
        own=_process_seconds(),
    )


def _process_seconds() -> float:
    """Return the CPU seconds of this process and all its children, running and ended."""
    current, seconds = psutil.Process(), 0.0
    for process in (current, *current.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds += float(times.user + times.system)
    own_times = current.cpu_times()  # its `children_` fields count the children that have ended
    return seconds + float(own_times.children_user + own_times.children_system)


def cpu_contention(ranks: Sequence[CpuTimes]) -> float:
    """Return the fraction of the cores that other programs used, on the most disturbed machine.

    `ranks` has the CPU seconds of each rank in the same period. Return 0.0 if the fraction is below 10%, if more than
    20% of the cores' time was idle, or if the period was too short to tell.
    """
    contention = 0.0
    for machine in {times.machine for times in ranks}:
        readings = [times for times in ranks if times.machine == machine]
        work, idle = max(times.work for times in readings), max(times.idle for times in readings)
        if work + idle < _MIN_SECONDS:
            continue
        other_share = (work - sum(times.own for times in readings)) / (work + idle)
        if idle <= _MAX_IDLE_SHARE * (work + idle) and other_share >= _MIN_OTHER_SHARE:
            contention = max(contention, other_share)
    return contention


def max_cpu_contention(readings: Sequence[CpuTimes], world: World) -> float:
    """Return the largest `cpu_contention` over the periods between successive readings.

    Every rank calls this, with the same number of readings.
    """
    differences = world.gather_json([vars(after.difference_from(before)) for before, after in pairwise(readings)])
    periods = [[CpuTimes(**times) for times in rank_times] for rank_times in zip(*differences, strict=True)]
    return max(map(cpu_contention, periods), default=0.0)
