"""A pipeline schedule as data: the ordered actions of each rank, shared by the runtime, the planner and the drawings.

The model is a chain of `num_stages` stages. `rank_of_stage` maps each stage to its rank, and a rank may have several
stages. The stage of an action is always on the rank that runs the action: `SEND_F` of stage 2 sends the output of stage
2, and `RECV_F` of stage 3 receives the input of stage 3. Neighbouring stages on the same rank need no messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from typing_extensions import override


class Op(StrEnum):
    """The kind of an action. The value is its letter in texts and pictures."""

    FORWARD = "F"
    BACKWARD = "B"  # the gradients of input and weights together
    BACKWARD_INPUT = "I"  # the gradient of the stage's input only
    BACKWARD_WEIGHT = "W"  # the gradients of the stage's weights only, any time after I
    UPDATE = "U"  # an optimizer step with the gradients up to this microbatch, while later microbatches are in flight
    SEND_F = "SF"  # this stage's output, to the next stage
    RECV_F = "RF"  # this stage's input, from the stage before
    SEND_B = "SB"  # the gradient of this stage's input, to the stage before
    RECV_B = "RB"  # the gradient of this stage's output, from the next stage

    @property
    def is_compute(self) -> bool:
        """Return True if the action computes, and False if it sends or receives a message."""
        return self in COMPUTE_OPS

    @property
    def is_send(self) -> bool:
        """Return True if the action sends a message."""
        return self in (Op.SEND_F, Op.SEND_B)

    @property
    def is_receive(self) -> bool:
        """Return True if the action receives a message, and so waits for it."""
        return self in (Op.RECV_F, Op.RECV_B)

    @property
    def computes_input_gradient(self) -> bool:
        """Return True if the previous stage can run its backward after this action."""
        return self in (Op.BACKWARD, Op.BACKWARD_INPUT)


COMPUTE_OPS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.UPDATE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """The identity of a message: an activation (`FORWARD`) or a gradient (`BACKWARD`), its stage and its microbatch.

    `stage` is the sending stage. It sends activations to `stage + 1` and gradients to `stage - 1`.
    """

    kind: Op
    stage: int
    microbatch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """An operation of a rank for one microbatch in one of the rank's stages. `peer` is the other rank of a message."""

    op: Op
    stage: int
    microbatch: int
    peer: int | None = None

    @override
    def __str__(self) -> str:
        arrow = "" if self.peer is None else f"{'>' if self.op.is_send else '<'}{self.peer}"
        return f"{self.op}{self.stage}.{self.microbatch}{arrow}"

    @property
    def message(self) -> Message:
        """Return the message that the action sends or receives. It is equal for the send and its receive."""
        kind, stage_offset = _MESSAGE_KINDS[self.op]
        return Message(kind=kind, stage=self.stage + stage_offset, microbatch=self.microbatch)


_MESSAGE_KINDS = {
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
        """Return the rank of the last stage, which computes loss and metrics."""
        return self.rank_of_stage[-1]

    @cached_property
    def has_backward(self) -> bool:
        """Return True if the program computes gradients, and False if it is for evaluation or generation."""
        return any(a.op.is_compute and a.op is not Op.FORWARD for row in self.actions for a in row)

    @cached_property
    def update_microbatches(self) -> tuple[int, ...]:
        """Return the microbatches after whose backward the stages update.

        Empty if the program has no updates: the training then updates after the program.
        """
        return tuple(sorted({a.microbatch for row in self.actions for a in row if a.op is Op.UPDATE}))

    @property
    def num_actions(self) -> int:
        """Return the number of actions of all ranks, including messages."""
        return sum(len(row) for row in self.actions)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages on a rank, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.rank_of_stage) if owner == rank)

    def compute_actions(self, rank: int) -> Actions:
        """Return a rank's actions without the messages."""
        return tuple(action for action in self.actions[rank] if action.op.is_compute)

    def receives_by_peer(self, rank: int) -> dict[int, Actions]:
        """Return this rank's receives from each peer, in the order in which the peer *sends* the messages.

        A transport that matches messages by order, not by their identity, must post the receives in this order.
        """
        receives = {(a.peer, a.message): a for a in self.actions[rank] if a.op.is_receive}
        in_send_order: dict[int, list[Action]] = {}
        for peer, row in enumerate(self.actions):
            for action in row:
                if action.op.is_send and action.peer == rank and (peer, action.message) in receives:
                    in_send_order.setdefault(peer, []).append(receives[peer, action.message])
        return {peer: tuple(actions) for peer, actions in in_send_order.items()}

    def __iter__(self) -> Iterator[Actions]:
        return iter(self.actions)
