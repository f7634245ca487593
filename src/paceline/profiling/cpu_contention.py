"""CPU contention: detects whether other programs used the cores while this run's ranks timed something."""

import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import psutil

from paceline.comm.process_group import World

_MUCH, _IDLE = 0.1, 0.2  # shares of the cores: others disturb if they use this much, and less is idle
_TELLS = 0.2  # over all cores: shorter readings are too coarse, because the kernel counts hundredths
_WORK = ("user", "nice", "system", "steal")  # without interrupts, which the ranks' own messages cause


@dataclass(frozen=True, kw_only=True)
class CpuTimes:
    """Seconds so far: work and idle time of the usable cores of `machine`, and of this process with its children."""

    machine: str
    work: float
    idle: float
    own: float

    def since(self, before: "CpuTimes") -> "CpuTimes":
        """Return the difference to an earlier reading."""
        work, idle, own = self.work - before.work, self.idle - before.idle, self.own - before.own
        return CpuTimes(machine=self.machine, work=work, idle=idle, own=own)


def read_cpu_times() -> CpuTimes:
    """Return the current CPU times."""
    every = psutil.cpu_times(percpu=True)
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(every))
    cores = [every[core] for core in usable if core < len(every)]
    return CpuTimes(
        machine=socket.gethostname(),
        work=sum(getattr(core, name, 0.0) for core in cores for name in _WORK),
        idle=sum(core.idle + getattr(core, "iowait", 0.0) for core in cores),
        own=_own(),
    )


def _own() -> float:
    this, found = psutil.Process(), 0.0
    for process in (this, *this.children(recursive=True)):
        with suppress(psutil.Error):
            times = process.cpu_times()
            found += float(times.user + times.system)
    ended = this.cpu_times()
    return found + float(ended.children_user + ended.children_system)


def cpu_contention(ranks: Sequence[CpuTimes]) -> float:
    """Return the share of the cores that other programs used, on the most disturbed machine.

    Each rank contributes its reading of the same period. The share is 0.0 if enough of the cores was idle, or if the
    period was too short.
    """
    found = 0.0
    for machine in {one.machine for one in ranks}:
        own = [one for one in ranks if one.machine == machine]
        work, idle = max(one.work for one in own), max(one.idle for one in own)
        if work + idle < _TELLS:
            continue
        others = (work - sum(one.own for one in own)) / (work + idle)
        if idle <= _IDLE * (work + idle) and others >= _MUCH:
            found = max(found, others)
    return found


def most_of_others(looks: Sequence[CpuTimes], world: World) -> float:
    """Return the largest `cpu_contention` over the periods between successive readings, as many on every rank.

    Every rank calls this.
    """
    every = world.gather_json([vars(after.since(before)) for before, after in pairwise(looks)])
    parts = [[CpuTimes(**seen) for seen in of_ranks] for of_ranks in zip(*every, strict=True)]
    return max(map(cpu_contention, parts), default=0.0)
