"""Lowering of compute orders to a program, by adding sends and receives.

The transport that the runtime has to offer:

- a send is posted and never waits for its receiver;
- a receive waits until its message has arrived. It may be posted earlier than its place in the program, and should
  be: its place in the program is where its value is needed, so where the rank waits;
- messages between two ranks are identified by `Action.message` (kind, stage, microbatch). If a transport can only
  match by order, post receives from a peer in the order of `Program.incoming`, which is the order they are sent in.

Then sending right after a value is made and receiving right before it is used neither deadlocks nor delays anything:
a rank waits only for values that its next compute needs. Any deadlock is one of the compute orders.
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
        actions=tuple(tuple(with_messages(order, owner=owner)) for order in orders),
    )


def messages_of(action: Action, *, owner: Sequence[int]) -> tuple[Action | None, Action | None]:
    """Return the receive that a compute needs before it, and the send that it needs after it."""
    if action.op is Op.FORWARD:
        return _message(Op.RECV_F, action, -1, owner), _message(Op.SEND_F, action, 1, owner)
    if action.op.gives_input_gradient:
        return _message(Op.RECV_B, action, 1, owner), _message(Op.SEND_B, action, -1, owner)
    return None, None


def with_messages(order: Iterable[Action], *, owner: Sequence[int]) -> Iterator[Action]:
    """Yield one rank's computes, each after the receive that it needs and before the send that it feeds."""
    for action in order:
        before, after = messages_of(action, owner=owner)
        yield from (step for step in (before, action, after) if step is not None)


def _message(op: Op, action: Action, shift: int, owner: Sequence[int]) -> Action | None:
    other = action.stage + shift
    if not 0 <= other < len(owner) or owner[other] == owner[action.stage]:
        return None
    return Action(op=op, stage=action.stage, microbatch=action.microbatch, peer=owner[other])


def forward_only(*, rank_of_stage: Sequence[int], micro: int) -> Program:
    """Return a program of forwards of `micro` microbatches; `rank_of_stage` may be any mapping, e.g. another program's.

    At every tick each rank runs the deepest of its stages that has an input, so the furthest microbatch finishes first.
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
