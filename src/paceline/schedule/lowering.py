"""Lower compute orders to a program, by adding sends and receives.

The program assumes this transport:

- A send never waits for its receiver.
- A receive waits until its message has arrived. In the program, a receive is right before the compute that needs
  the message, because the rank waits there. The runtime should post the receive earlier.
- Messages between two ranks are identified by `Action.message` (kind, stage, microbatch). A transport that can only
  match messages by order must post the receives from a peer in the order of `Program.receives_by_peer`.

With this transport, messages add no deadlock and no delay, because a rank waits only for values that its next compute
needs. Any deadlock comes from the compute orders.
"""

from collections.abc import Iterable, Iterator, Sequence

from paceline.schedule.program import Action, Op, Program


def lower(orders: Sequence[Sequence[Action]], *, name: str, rank_of_stage: Sequence[int], num_micro: int) -> Program:
    """Return the program of these compute orders, one per rank, with sends and receives added."""
    return Program(
        name=name,
        num_ranks=len(orders),
        num_stages=len(rank_of_stage),
        num_micro=num_micro,
        rank_of_stage=tuple(rank_of_stage),
        actions=tuple(tuple(add_messages(order, rank_of_stage=rank_of_stage)) for order in orders),
    )


def find_messages(action: Action, *, rank_of_stage: Sequence[int]) -> tuple[Action | None, Action | None]:
    """Return the receive before a compute and the send after it.

    Each is None if there is no such message: the neighbouring stage is on the same rank, or does not exist.
    """
    if action.op is Op.FORWARD:
        return _message(Op.RECV_F, action, -1, rank_of_stage), _message(Op.SEND_F, action, 1, rank_of_stage)
    if action.op.computes_input_gradient:
        return _message(Op.RECV_B, action, 1, rank_of_stage), _message(Op.SEND_B, action, -1, rank_of_stage)
    return None, None


def add_messages(order: Iterable[Action], *, rank_of_stage: Sequence[int]) -> Iterator[Action]:
    """Yield one rank's computes, each after its receive and before its send, if it has these."""
    for action in order:
        receive, send = find_messages(action, rank_of_stage=rank_of_stage)
        yield from (a for a in (receive, action, send) if a is not None)


def _message(op: Op, action: Action, stage_offset: int, rank_of_stage: Sequence[int]) -> Action | None:
    neighbor = action.stage + stage_offset
    if not 0 <= neighbor < len(rank_of_stage) or rank_of_stage[neighbor] == rank_of_stage[action.stage]:
        return None
    return Action(op=op, stage=action.stage, microbatch=action.microbatch, peer=rank_of_stage[neighbor])


def forward_only(*, rank_of_stage: Sequence[int], micro: int) -> Program:
    """Return a program of forwards only, for `micro` microbatches.

    At every tick, a rank runs the last one of its stages whose input exists, so that microbatches finish early.
    """
    ranks, stages = max(rank_of_stage) + 1, range(len(rank_of_stage))
    stages_by_rank = [[s for s in reversed(stages) if rank_of_stage[s] == rank] for rank in range(ranks)]
    num_done = [0] * len(stages)  # finished microbatches of each stage
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    while num_done[-1] < micro:
        num_inputs = [micro, *num_done]
        next_stages = [
            next((s for s in rank_stages if num_done[s] < num_inputs[s]), None) for rank_stages in stages_by_rank
        ]
        for rank, stage in enumerate(next_stages):
            if stage is not None:
                orders[rank].append(Action(op=Op.FORWARD, stage=stage, microbatch=num_done[stage]))
                num_done[stage] += 1
    return lower(orders, name="forward_only", rank_of_stage=rank_of_stage, num_micro=micro)
