"""Compute the activations in flight and the makespan of a pipeline schedule by closed forms.

Many programs are too long to simulate. `max_in_flight` equals the count in the `Program`. `makespan` equals the
simulation if all stages are equal and messages take no time. Otherwise it is approximate, and tests state the error.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.schedule.program import Op, Program

LOOPED_SCHEDULES = ("interleaved", "breadth_first", "zb_interleaved")
"""The schedules in which stage s is on rank s modulo the number of ranks, with several stages per rank."""
SPLIT_BACKWARD_SCHEDULES = ("zb_h1", "zb_interleaved", "zbv")
"""The schedules that compute the gradients of inputs and of weights as two actions."""
MODELED_SCHEDULES = ("naive", "gpipe", "1f1b", *LOOPED_SCHEDULES, "zb_h1", "zbv")
"""The schedules for which there are closed forms."""


def count_in_flight(program: Program, rank: int) -> int:
    """Return `max_in_flight` by the naive method, which counts the activations in a program."""
    in_flight = highest = 0
    for action in program.compute_actions(rank):
        in_flight += action.op is Op.FORWARD
        highest = max(highest, in_flight)
        in_flight -= action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT)
    return highest


def max_in_flight(schedule: str, *, ranks: int, micro: int, virtual: int, rank: int) -> int:
    """Return the largest number of activations that a rank holds at once, each of one stage and one microbatch.

    There are `micro` microbatches and `virtual` stages per rank.
    """
    total = micro * virtual
    if schedule == "naive":
        return virtual
    if schedule in ("gpipe", "breadth_first"):
        return total
    if schedule == "zbv":
        return min(total, 2 * ranks, micro + 1 + rank)
    rounds = max(1, micro // ranks)
    group = -(-micro // rounds)
    warmup = (ranks - 1 - rank) * (2 if virtual > 1 else 1)
    num_delayed_weights = rank if schedule in SPLIT_BACKWARD_SCHEDULES else 0
    return min(total, (virtual - 1) * group + warmup + 1 + num_delayed_weights)


def has_reliable_makespan(schedule: str, *, ranks: int, micro: int) -> bool:
    """Return True if `makespan` is accurate. It omits the gaps that some schedules have with few microbatches."""
    if schedule == "zbv":
        return micro >= 2 * (ranks - 1)
    return schedule in MODELED_SCHEDULES and (schedule != "zb_interleaved" or micro >= ranks)


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """The seconds of one microbatch in every stage, in the order of the model."""

    forward: Sequence[float]
    backward_input: Sequence[float]
    backward_weight: Sequence[float]
    hop_seconds: float = 0.0
    """The seconds of a message to the next stage."""


def makespan(schedule: str, stage_times: StageTimes, *, ranks: int, micro: int, virtual: int) -> float:
    """Return the seconds from the start of the first compute to the end of the last compute.

    The busiest rank always computes, except while the pipeline fills and drains. If too few microbatches are in flight
    to hide messages, every cycle of a rank waits for a message. The letters are those of the papers: p ranks, m
    microbatches, v stages per rank.
    """
    p, m, v, hop = ranks, micro, virtual, stage_times.hop_seconds
    stage_seconds = [
        f + i + w
        for f, i, w in zip(stage_times.forward, stage_times.backward_input, stage_times.backward_weight, strict=True)
    ]
    total = sum(stage_seconds)
    slowest_rank = slowest_rank_seconds(stage_seconds, schedule=schedule, ranks=p)
    num_stages = p * v
    if schedule == "naive":
        return m * (total + 2 * (num_stages - 1) * hop)
    if schedule == "gpipe":
        forward, backward = (
            max(stage_times.forward),
            max(i + w for i, w in zip(stage_times.backward_input, stage_times.backward_weight, strict=True)),
        )
        return total + 2 * (p - 1) * hop + (m - 1) * (max(forward, hop) + max(backward, hop))
    if schedule in ("zb_h1", "zb_interleaved", "zbv"):
        return _zero_bubble_makespan(schedule, stage_times, slowest_rank, p=p, m=m, v=v)
    fill = (total - slowest_rank) / v
    cycle_bounds = (slowest_rank, v * hop)
    if schedule == "1f1b":
        cycle = max(
            *cycle_bounds, (total + 2 * (p - 1) * hop) / p
        )  # p microbatches are in flight, forward and backward
        return slowest_rank + fill + 2 * (p - 1) * hop + (m - 1) * cycle
    num_in_flight = (v + 1) * p - 1 if schedule == "interleaved" else num_stages
    cycle = (
        max(*cycle_bounds, v * (total + 2 * (num_stages - 1) * hop) / num_in_flight)
        if schedule == "interleaved"
        else max(cycle_bounds)
    )
    idle = max(0, p - m) * (v - 1) / v * slowest_rank
    return m * cycle + idle + fill + 2 * (num_stages - 1) * hop


def _zero_bubble_makespan(
    schedule: str, stage_times: StageTimes, slowest_rank: float, *, p: int, m: int, v: int
) -> float:
    """Return the makespan of a zero-bubble schedule. A weight gradient fills a gap of at most its own length."""
    n, hop = p * v, stage_times.hop_seconds
    f, i, w = (sum(s) / n for s in (stage_times.forward, stage_times.backward_input, stage_times.backward_weight))
    if schedule == "zbv":
        idle = max(f, i, w, 2 * (i - w))
        cycle = max(slowest_rank, v * hop, 2 * (f + i) + 4 * (p - 1) / p * hop)
    else:
        idle = f + i - min(w, f, i) * min(1.0, (m - 1) / (p - 1) if p > 1 else 1.0)
        cycle = max(slowest_rank, v * hop, v * (f + i) + 2 * (n - 1) / p * hop)
    return m * cycle + (p - 1) * idle + 2 * (n - 1) * hop


def slowest_rank_seconds(stage_seconds: Sequence[float], *, schedule: str, ranks: int) -> float:
    """Return the seconds per microbatch of the rank that all other ranks wait for.

    Looped schedules send a group of microbatches through one stage of every rank, then through the next stage of every
    rank. In each round, all ranks wait for the slowest stage.
    """
    if schedule in LOOPED_SCHEDULES:
        return sum([max(stage_seconds[start : start + ranks]) for start in range(0, len(stage_seconds), ranks)])
    if schedule == "zbv":
        return max([stage_seconds[rank] + stage_seconds[2 * ranks - 1 - rank] for rank in range(ranks)])
    return (
        max(stage_seconds)
        if len(stage_seconds) == ranks
        else max([sum(stage_seconds[rank::ranks]) for rank in range(ranks)])
    )
