"""Closed forms for a schedule's activations in flight and its makespan, for programs too long to simulate.

`max_in_flight` equals the `Program`'s own count. `makespan` equals its simulation for equal stages and messages that
take no time; elsewhere it is approximate, and tests state the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.schedule.program import Op, Program

LOOPED = ("interleaved", "breadth_first", "zb_interleaved")
SPLITS = ("zb_h1", "zb_interleaved", "zbv")
KNOWN = ("naive", "gpipe", "1f1b", *LOOPED, "zb_h1", "zbv")


def held_by(program: Program, rank: int) -> int:
    """Return the most stage activations a rank holds at once, from its program: the naive `max_in_flight`."""
    level = highest = 0
    for action in program.computes(rank):
        level += action.op is Op.FORWARD
        highest = max(highest, level)
        level -= action.op in (Op.BACKWARD, Op.WEIGHT)
    return highest


def max_in_flight(schedule: str, *, ranks: int, micro: int, virtual: int, rank: int) -> int:
    """Return the most activations of one stage and one microbatch that a rank holds at once."""
    every = micro * virtual
    if schedule == "naive":
        return virtual
    if schedule in ("gpipe", "breadth_first"):
        return every
    if schedule == "zbv":
        return min(every, 2 * ranks, micro + 1 + rank)
    rounds = max(1, micro // ranks)
    group = -(-micro // rounds)
    after = (ranks - 1 - rank) * (2 if virtual > 1 else 1)
    put_off = rank if schedule in SPLITS else 0
    return min(every, (virtual - 1) * group + after + 1 + put_off)


def is_sure(schedule: str, *, ranks: int, micro: int) -> bool:
    """Return True if `makespan` was checked against the program: with few microbatches, gaps appear that it omits."""
    if schedule == "zbv":
        return micro >= 2 * (ranks - 1)
    return schedule in KNOWN and (schedule != "zb_interleaved" or micro >= ranks)


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """The seconds of every stage, in the model's order; `hop` is the time of a message between neighbours."""

    forward: Sequence[float]
    input: Sequence[float]
    weight: Sequence[float]
    hop: float = 0.0


def makespan(schedule: str, turns: StageTimes, *, ranks: int, micro: int, virtual: int) -> float:
    """Return the seconds from the start of the first compute to the end of the last.

    The busiest rank computes all the time except while the pipeline fills and drains. If too few microbatches are in
    flight to hide a message, every round waits for the rest of it.
    """
    p, m, v, hop = ranks, micro, virtual, turns.hop
    each = [f + i + w for f, i, w in zip(turns.forward, turns.input, turns.weight, strict=True)]
    total = sum(each)
    most = slowest_rank_seconds(each, schedule=schedule, ranks=p)
    num_stages = p * v
    if schedule == "naive":
        return m * (total + 2 * (num_stages - 1) * hop)
    if schedule == "gpipe":
        forward, backward = max(turns.forward), max(i + w for i, w in zip(turns.input, turns.weight, strict=True))
        return total + 2 * (p - 1) * hop + (m - 1) * (max(forward, hop) + max(backward, hop))
    if schedule in ("zb_h1", "zb_interleaved", "zbv"):
        return _filled(schedule, turns, most, p=p, m=m, v=v)
    fill = (total - most) / v
    loop = (most, v * hop)
    if schedule == "1f1b":
        cycle = max(*loop, (total + 2 * (p - 1) * hop) / p)  # p microbatches are in flight, forward and backward
        return most + fill + 2 * (p - 1) * hop + (m - 1) * cycle
    under_way = (v + 1) * p - 1 if schedule == "interleaved" else num_stages
    cycle = max(*loop, v * (total + 2 * (num_stages - 1) * hop) / under_way) if schedule == "interleaved" else max(loop)
    idle = max(0, p - m) * (v - 1) / v * most
    return m * cycle + idle + fill + 2 * (num_stages - 1) * hop


def _filled(schedule: str, turns: StageTimes, most: float, *, p: int, m: int, v: int) -> float:
    """Return the makespan of a zero-bubble schedule: weight gradients fill gaps, up to the length of each gap."""
    n, hop = p * v, turns.hop
    f, i, w = (sum(part) / n for part in (turns.forward, turns.input, turns.weight))
    if schedule == "zbv":
        idle = max(f, i, w, 2 * (i - w))
        cycle = max(most, v * hop, 2 * (f + i) + 4 * (p - 1) / p * hop)
    else:
        idle = f + i - min(w, f, i) * min(1.0, (m - 1) / (p - 1) if p > 1 else 1.0)
        cycle = max(most, v * hop, v * (f + i) + 2 * (n - 1) / p * hop)
    return m * cycle + (p - 1) * idle + 2 * (n - 1) * hop


def slowest_rank_seconds(each: Sequence[float], *, schedule: str, ranks: int) -> float:
    """Return the seconds per microbatch of the rank that all others wait for.

    Looped schedules send groups of microbatches through one stage of every rank, then through the next stage of every
    rank: all ranks wait for the slowest stage of each round.
    """
    if schedule in LOOPED:
        return sum([max(each[start : start + ranks]) for start in range(0, len(each), ranks)])
    if schedule == "zbv":
        return max([each[rank] + each[2 * ranks - 1 - rank] for rank in range(ranks)])
    return max(each) if len(each) == ranks else max([sum(each[rank::ranks]) for rank in range(ranks)])
