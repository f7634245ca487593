"""The share of the cores that other programs used while something was timed."""

import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from paceline.comm.process_group import World
from paceline.planner.layout.host_resources import usable_cores
from paceline.profiling.cpu_contention import CpuTimes, cpu_contention, max_cpu_contention, read_cpu_times

SPIN = "import time\nuntil = time.monotonic() + {seconds}\nwhile time.monotonic() < until: pass"


def seen(own: float, *, work: float = 20.0, idle: float = 0.0, machine: str = "a") -> CpuTimes:
    return CpuTimes(machine=machine, work=work, idle=idle, own=own)


@pytest.mark.parametrize(
    ("ranks", "share"),
    [
        ([seen(19.0)], 0.0),
        ([seen(15.0)], 0.25),
        ([seen(7.5), seen(7.5)], 0.25),
        ([seen(5.0, work=10.0, idle=10.0)], 0.0),
        ([seen(21.0)], 0.0),
        ([seen(20.0, machine="a"), seen(10.0, machine="b")], 0.5),
        ([seen(0.0, work=0.0)], 0.0),
        ([seen(0.0, work=0.1)], 0.0),
    ],
    ids=[
        "its own",
        "one rank",
        "two ranks",
        "half was idle",
        "rounded",
        "one of two machines",
        "no time",
        "little time",
    ],
)
def test_what_is_not_the_ranks_own_is_the_others(ranks: Sequence[CpuTimes], share: float) -> None:
    assert cpu_contention(ranks) == pytest.approx(share)


def test_the_most_disturbed_part_counts() -> None:
    """Between the looks others had nothing, a quarter, and nothing with half of the cores idle."""
    looks = [seen(0.0, work=0.0), seen(20.0), seen(35.0, work=40.0), seen(45.0, work=60.0, idle=20.0)]
    assert max_cpu_contention(looks, World.alone()) == pytest.approx(0.25)
    assert max_cpu_contention(looks[:2], World.alone()) == max_cpu_contention(looks[:1], World.alone()) == 0.0


@pytest.mark.clock
def test_a_busy_program_is_seen_and_a_child_is_not_another() -> None:
    """The first are no children of this process: the shell that starts them ends."""
    before, began = read_cpu_times(), time.monotonic()
    for _ in range(usable_cores()):
        command = f"{sys.executable} -c '{SPIN.format(seconds=1.5)}' >/dev/null 2>&1 &"
        subprocess.run(["sh", "-c", command], check=True)
    time.sleep(1.2)
    found = read_cpu_times().difference_from(before)
    assert found.own < 0.3 * found.work
    assert cpu_contention([found]) > 0.5
    assert found.work + found.idle == pytest.approx((time.monotonic() - began) * usable_cores(), rel=0.3)
    time.sleep(0.5)
    before = read_cpu_times()
    subprocess.run([sys.executable, "-c", SPIN.format(seconds=0.5)], check=True)
    assert read_cpu_times().difference_from(before).own >= 0.2  # of a core that others may want too
