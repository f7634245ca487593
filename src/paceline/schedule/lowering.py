"""Lowering of compute orders to a program, by adding sends and receives.

The runtime needs this transport:

- a send is posted and never waits for its receiver;
- a receive waits until its message has arrived. In the program it is right before the compute that needs the message,
  where the rank waits; the runtime should post it earlier;
- messages between two ranks are identified by `Action.message` (kind, stage, microbatch). If a transport can only
  match by order, post the receives from a peer in the order of `Program.receives_by_peer`, in which they are sent.

Then a send right after its value is computed and a receive right before its value is used cause no deadlock and no
delay: a rank waits only for values that its next compute needs. Any deadlock comes from the compute orders.
"""

from collections.abc import Iterable, Iterator, Sequence

from paceline.schedule.program import Action, Op, Program


def lower(orders: Sequence[Sequence[Action]], *, name: str, rank_of_stage: Sequence[int], num_micro: int) -> Program:
    """Return the program of these compute orders, one per rank, with its sends and receives."""
    owner = tuple(rank_of_stage)
    return Program(
        name=name,
        num_ranks=len(orders),
        num_stages=len(owner),
        num_micro=num_micro,
        rank_of_stage=owner,
        actions=tuple(tuple(add_messages(order, owner=owner)) for order in orders),
    )


def find_messages(action: Action, *, owner: Sequence[int]) -> tuple[Action | None, Action | None]:
    """Return the receive before a compute and the send after it; None where the neighbour is on the same rank."""
    if action.op is Op.FORWARD:
        return _message(Op.RECV_F, action, -1, owner), _message(Op.SEND_F, action, 1, owner)
    if action.op.computes_input_gradient:
        return _message(Op.RECV_B, action, 1, owner), _message(Op.SEND_B, action, -1, owner)
    return None, None


def add_messages(order: Iterable[Action], *, owner: Sequence[int]) -> Iterator[Action]:
    """Yield one rank's computes, each between its receive and its send."""
    for action in order:
        receive, send = find_messages(action, owner=owner)
        yield from (step for step in (receive, action, send) if step is not None)


def _message(op: Op, action: Action, shift: int, owner: Sequence[int]) -> Action | None:
    neighbor = action.stage + shift
    if not 0 <= neighbor < len(owner) or owner[neighbor] == owner[action.stage]:
        return None
    return Action(op=op, stage=action.stage, microbatch=action.microbatch, peer=owner[neighbor])


def forward_only(*, rank_of_stage: Sequence[int], micro: int) -> Program:
    """Return a program of forwards only, for `micro` microbatches; `rank_of_stage` may be that of another program.

    At every tick, each rank runs the last of its stages that has an input, so that microbatches finish early.
    """
    owner = tuple(rank_of_stage)
    ranks = max(owner) + 1
    stages_by_rank = [[s for s in reversed(range(len(owner))) if owner[s] == rank] for rank in range(ranks)]
    num_done = [0] * len(owner)  # finished microbatches of each stage
    orders: list[list[Action]] = [[] for _ in range(ranks)]
    while num_done[-1] < micro:
        num_inputs = [micro, *num_done]
        next_stages = [next((s for s in stages if num_done[s] < num_inputs[s]), None) for stages in stages_by_rank]
        for rank, stage in enumerate(next_stages):
            if stage is not None:
                orders[rank].append(Action(op=Op.FORWARD, stage=stage, microbatch=num_done[stage]))
                num_done[stage] += 1
    return lower(orders, name="forward_only", rank_of_stage=owner, num_micro=micro)
