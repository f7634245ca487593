"""A pipeline schedule as data: the ordered actions of each rank, shared by the runtime, the planner and the drawings.

The model is a chain of `num_stages` stages; `rank_of_stage` maps each stage to its rank, and a rank may hold several.
An action names the stage *on its own rank* that it belongs to: `SEND_F` of stage 2 sends the output of stage 2,
`RECV_F` of stage 3 receives the input of stage 3. A stage whose neighbour is on the same rank sends nothing to it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Op(StrEnum):
    """The kind of an action; the value is its spelling in texts and pictures."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of input and weights together
    INPUT = "I"  # the gradient of the stage's input only
    WEIGHT = "W"  # the gradients of its weights only, any time after INPUT
    UPDATE = "U"  # an optimizer step with the gradients up to this microbatch, while others are in flight
    SEND_F = "SF"  # this stage's output, to the next stage
    RECV_F = "RF"  # this stage's input, from the stage before
    SEND_B = "SB"  # the gradient of this stage's input, to the stage before
    RECV_B = "RB"  # the gradient of this stage's output, from the next stage

    @property
    def is_compute(self) -> bool:
        """Return True for a compute; all other actions are messages."""
        return self in COMPUTES

    @property
    def is_send(self) -> bool:
        """Return True if the action sends a message."""
        return self in (Op.SEND_F, Op.SEND_B)

    @property
    def is_receive(self) -> bool:
        """Return True if the action waits for a message."""
        return self in (Op.RECV_F, Op.RECV_B)

    @property
    def gives_input_gradient(self) -> bool:
        """Return True if the previous stage can run its backward after this action."""
        return self in (Op.BACKWARD, Op.INPUT)


COMPUTES = (Op.FORWARD, Op.BACKWARD, Op.INPUT, Op.WEIGHT, Op.UPDATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """The identity of a message: activation (`FORWARD`) or gradient (`BACKWARD`), its stage and microbatch.

    `stage` is the stage that produced it: an activation goes from `stage` to `stage + 1`, a gradient to `stage - 1`.
    """

    kind: Op
    stage: int
    microbatch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """An operation of a rank for one microbatch in one of its stages; `peer` is the other rank of a message."""

    op: Op
    stage: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        arrow = "" if self.peer is None else f"{'>' if self.op.is_send else '<'}{self.peer}"
        return f"{self.op}{self.stage}.{self.microbatch}{arrow}"

    @property
    def message(self) -> Message:
        """Return the message that is sent or received; it is equal on both sides."""
        kind, shift = _MESSAGES[self.op]
        return Message(kind=kind, stage=self.stage + shift, microbatch=self.microbatch)


_MESSAGES = {
    Op.SEND_F: (Op.FORWARD, 0),
    Op.RECV_F: (Op.FORWARD, -1),
    Op.SEND_B: (Op.BACKWARD, 0),
    Op.RECV_B: (Op.BACKWARD, 1),
}

Actions = tuple[Action, ...]


@dataclass(frozen=True, kw_only=True)
class Program:
    """The actions of every rank: `actions[rank]` in order, for `num_micro` microbatches and `num_stages` stages."""

    name: str
    num_ranks: int
    num_stages: int
    num_micro: int
    rank_of_stage: tuple[int, ...]
    actions: tuple[Actions, ...]

    @property
    def loss_rank(self) -> int:
        """Return the rank that holds the last stage, and so computes loss and metrics."""
        return self.rank_of_stage[-1]

    @cached_property
    def trains(self) -> bool:
        """Return True if the program computes gradients; if not, it is for evaluation and generation."""
        return any(a.op.is_compute and a.op is not Op.FORWARD for row in self.actions for a in row)

    @cached_property
    def updates(self) -> tuple[int, ...]:
        """Return the microbatches after whose gradients stages update; empty if all update together at the end."""
        return tuple(sorted({a.microbatch for row in self.actions for a in row if a.op is Op.UPDATE}))

    @property
    def num_actions(self) -> int:
        """Return the number of actions of all ranks, messages included."""
        return sum(len(row) for row in self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in the model's order."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def computes(self, rank: int) -> Actions:
        """Return a rank's actions without the messages."""
        return tuple(action for action in self.actions[rank] if action.op.is_compute)

    def incoming(self, rank: int) -> dict[int, Actions]:
        """Return, for each peer, this rank's receives from it in the order in which that peer *sends* them.

        A transport that matches messages by order, not by name, must post receives in this order.
        """
        own = {(a.peer, a.message): a for a in self.actions[rank] if a.op.is_receive}
        found: dict[int, list[Action]] = {}
        for peer, row in enumerate(self.actions):
            for action in row:
                if action.op.is_send and action.peer == rank and (peer, action.message) in own:
                    found.setdefault(peer, []).append(own[peer, action.message])
        return {peer: tuple(actions) for peer, actions in found.items()}

    def __iter__(self) -> Iterator[Actions]:
        return iter(self.actions)
