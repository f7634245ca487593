"""Forward-only programs, for evaluation and generation."""

from collections.abc import Sequence

from paceline.schedule.lower import lower
from paceline.schedule.program import Action, Op, Program


def forward_only(*, rank_of_stage: Sequence[int], micro: int) -> Program:
    """Forwards of `micro` microbatches through stages that lie on ranks in any way: `program.rank_of_stage` of another.

    At every tick each rank does the deepest of its stages that has something to do: what is furthest is finished first.
    """
    owner = tuple(rank_of_stage)
    ranks = max(owner) + 1
    deepest_first = [[s for s in reversed(range(len(owner))) if owner[s] == rank] for rank in range(ranks)]
    done = [0] * len(owner)  # microbatches that each stage has done
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    while done[-1] < micro:
        before = [micro, *done]
        ready = [next((s for s in stages if done[s] < before[s]), None) for stages in deepest_first]
        for rank, stage in enumerate(ready):
            if stage is not None:
                orders[rank].append(Action(op=Op.FORWARD, stage=stage, microbatch=done[stage]))
                done[stage] += 1
    return lower(orders, name="forward_only", rank_of_stage=owner, num_micro=micro)
