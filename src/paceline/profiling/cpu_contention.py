"""CPU contention: detect whether other programs used the cores while this run's ranks were timing steps."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import psutil

from paceline.comm.process_group import World

_MIN_OTHER_SHARE, _MAX_IDLE_SHARE = 0.1, 0.2  # of the cores: others disturb if they use more and less is idle
_MIN_SECONDS = 0.2  # over all cores: shorter readings are too coarse, because the kernel counts hundredths
_WORK_FIELDS = ("user", "nice", "system", "steal")  # without interrupts, which the ranks' own messages cause


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """Seconds so far: `work` and `idle` of the usable cores of `machine`, `own` of this process and its children."""

    machine: str
    work: float
    idle: float
    own: float

    def difference_from(self, earlier: "CpuTimes") -> "CpuTimes":
        """Return the difference to an earlier reading."""
        work, idle, own = self.work - earlier.work, self.idle - earlier.idle, self.own - earlier.own
        return CpuTimes(machine=self.machine, work=work, idle=idle, own=own)


def read_cpu_times() -> CpuTimes:
    """Return the current CPU times."""
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
    current, seconds = psutil.Process(), 0.0
    for process in (current, *current.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            seconds += float(times.user + times.system)
    ended = current.cpu_times()
    return seconds + float(ended.children_user + ended.children_system)


def cpu_contention(ranks: Sequence[CpuTimes]) -> float:
    """Return the share of the cores that other programs used, on the most disturbed machine.

    Each rank contributes its reading of the same period. The share is 0.0 if enough of the cores was idle, or if the
    period was too short.
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
    """Return the largest `cpu_contention` over the periods between successive readings, as many on every rank.

    Every rank calls this.
    """
    differences = world.gather_json([vars(after.difference_from(before)) for before, after in pairwise(readings)])
    periods = [[CpuTimes(**times) for times in of_ranks] for of_ranks in zip(*differences, strict=True)]
    return max(map(cpu_contention, periods), default=0.0)
