"""The interpreter of pipeline programs: one for all schedules, for training and for forward-only passes."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.errors import JobError, LayoutError
from paceline.parallel.pipeline.chain.stages import StageOutput
from paceline.schedule.program import Action, Op, Program
from paceline.step.pipeline.p2p import StageChannel, StageLink
from paceline.step.pipeline.split_backward import DeferredWeightGrad, backward_input, backward_weight
from paceline.torch_internals.private_api import add_gradients

At = tuple[int, int]
Watch = Callable[[Action, float, float], None]


class StageWork(Protocol):
    """The work at a stage; the interpreter decides when it runs."""

    def forward(self, *, stage: int, microbatch: int, received: StageOutput | None) -> StageOutput | Tensor | None:
        """Run one microbatch through one stage; return the output for the next stage, or on the last stage the loss.

        A forward-only program ignores what the last stage returns.
        """

    def again(self, *, microbatch: int) -> AbstractContextManager[None]:
        """Return the context for a backward, or half of one, in which recomputation sees the state of the forward."""

    def before_backward(self, *, stage: int, microbatch: int) -> None:
        """Prepare for weight gradients to be added, by BACKWARD or WEIGHT."""

    def after_backward(self, *, stage: int, microbatch: int) -> None:
        """Process the weight gradients that were added."""


@dataclass(kw_only=True)
class _Live:
    """The state of a microbatch at a stage between its forward and its backward."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    rest: DeferredWeightGrad | None = None


class Pipeline:
    """An interpreter of one rank's part of a program; the ranks of the `World` are those of the program.

    `splits=False` runs a stage's full backward at INPUT and does nothing at WEIGHT: the backward of stages that
    recompute or are sharded cannot be split. `is_continuous`: `expect_actions` and `run_action` are called repeatedly
    until `pause`, and a receive is always posted for the next message on each link.
    """

    def __init__(
        self,
        program: Program,
        *,
        world: World,
        splits: bool = True,
        is_continuous: bool = False,
        watch: Watch | None = None,
    ) -> None:
        if program.num_ranks != world.world_size:
            raise LayoutError(
                f"the schedule {program.name} is for {program.num_ranks} ranks, but the pipeline "
                f"has {world.world_size}."
            )
        self.program = program
        self._rank = world.rank
        self._splits = splits
        self._watch = watch
        self._is_continuous = is_continuous
        self._wire = StageChannel(world, channel=int(is_continuous))
        self._sent_on: set[StageLink] = set()
        self._own = set(program.stages_of(world.rank))
        self._live: dict[At, _Live] = {}
        self._arrived: dict[At, StageOutput] = {}
        self._leaving: dict[At, StageOutput] = {}
        self._gradients: dict[At, list[Tensor | None]] = {}
        self._returning: dict[At, list[Tensor | None]] = {}
        self._expected: dict[StageLink, int] = {}
        self._do: dict[Op, Callable[[Action, StageWork], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.INPUT: self._input if splits else self._backward,
            Op.WEIGHT: self._weight if splits else _nothing,
            Op.SEND_F: self._send_forward,
            Op.RECV_F: self._receive_forward,
            Op.SEND_B: self._send_backward,
            Op.RECV_B: self._receive_backward,
        }

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent so far."""
        return self._wire.sent_bytes

    def run(self, work: StageWork) -> None:
        """Run one step's microbatches. Each parameter's `.grad` receives the sum over microbatches, without division.

        Raises:
            JobError: the last stage's loss does not depend on the weights.
        """
        actions = self.program.actions[self._rank]
        self.expect(actions)
        try:
            with nullcontext() if self.program.has_backward else torch.no_grad():
                for action in actions:
                    self.one(action, work)
            self.finish()
        finally:
            for left in (self._live, self._arrived, self._leaving, self._gradients, self._returning):
                left.clear()

    def finish(self) -> None:
        """Wait until all sends have completed."""
        self._wire.finish()

    def pause(self) -> None:
        """Cancel the posted receives. All ranks call this after the same part of the program."""
        self._wire.pause(sent_on=sorted(self._sent_on, key=lambda edge: edge.tag) if self._wire.matches_tags else ())
        self._sent_on.clear()

    def one(self, action: Action, work: StageWork) -> None:
        """Run one of the actions given to `expect_actions`."""
        if self._watch is None:
            self._do[action.op](action, work)
            return
        began = time.perf_counter()
        self._do[action.op](action, work)
        self._watch(action, began, time.perf_counter())

    # -- compute

    def _forward(self, action: Action, work: StageWork) -> None:
        at = (action.stage, action.microbatch)
        received = self._arrived.pop(at, None)
        output = work.forward(stage=action.stage, microbatch=action.microbatch, received=received)
        inputs = [] if received is None else [t for t in received.tensors if t.requires_grad]
        if isinstance(output, StageOutput):
            self._pass_on(at, output)
            outputs = [tensor for tensor in output.tensors if tensor.requires_grad]
        else:
            outputs = [] if output is None else [output]
            if self.program.has_backward and not any(tensor.requires_grad for tensor in outputs):
                raise JobError(
                    "the loss does not depend on any trainable parameter of the last stage or before it.",
                    hint="return the loss as a tensor that the model's output flows into",
                )
        if self.program.has_backward:
            self._live[at] = _Live(inputs=inputs, outputs=outputs)

    def _pass_on(self, at: At, sent: StageOutput) -> None:
        following = (at[0] + 1, at[1])
        if following[0] in self._own:
            self._arrived[following] = sent.received()
        else:
            self._leaving[at] = sent

    def _backward(self, action: Action, work: StageWork) -> None:
        at = (action.stage, action.microbatch)
        live = self._ready(at)
        work.before_backward(stage=action.stage, microbatch=action.microbatch)
        if live.outputs:
            with work.again(microbatch=action.microbatch):
                add_gradients(live.outputs, live.gradients)
        self._return(at, [tensor.grad for tensor in live.inputs])
        work.after_backward(stage=action.stage, microbatch=action.microbatch)

    def _input(self, action: Action, work: StageWork) -> None:
        at = (action.stage, action.microbatch)
        live = self._ready(at)
        with work.again(microbatch=action.microbatch):
            done = (
                backward_input(live.outputs, live.gradients, live.inputs)
                if live.outputs
                else ([], DeferredWeightGrad())
            )
        gradients, rest = done
        self._return(at, gradients)
        self._live[at] = _Live(rest=rest)

    def _weight(self, action: Action, work: StageWork) -> None:
        live = self._live.pop((action.stage, action.microbatch))
        assert live.rest is not None, "WEIGHT comes after INPUT"
        work.before_backward(stage=action.stage, microbatch=action.microbatch)
        with work.again(microbatch=action.microbatch):
            backward_weight(live.rest)
        work.after_backward(stage=action.stage, microbatch=action.microbatch)

    def _ready(self, at: At) -> _Live:
        """Return the pending backward with only the outputs that have a gradient; the gradient of a loss is None."""
        live = self._live.pop(at)
        arrived = self._gradients.pop(at, None)
        if arrived is None:
            live.gradients = [None] * len(live.outputs)
            return live
        pairs = [(out, g) for out, g in zip(live.outputs, arrived, strict=True) if g is not None]
        live.outputs, live.gradients = [out for out, _ in pairs], [g for _, g in pairs]
        return live

    def _return(self, at: At, gradients: list[Tensor | None]) -> None:
        before = (at[0] - 1, at[1])
        if before[0] in self._own:
            self._gradients[before] = gradients
        elif before[0] >= 0:
            self._returning[at] = gradients

    # -- messages

    def _send_forward(self, action: Action, work: StageWork) -> None:
        sent = self._leaving.pop((action.stage, action.microbatch))
        trains = [int(tensor.requires_grad) for tensor in sent.tensors]
        self._send(action, sent.tensors, [sent.spec, trains])

    def _receive_forward(self, action: Action, work: StageWork) -> None:
        tensors, (spec, trains) = self._receive(action)
        for tensor, needs in zip(tensors, trains, strict=True):
            tensor.requires_grad_(bool(needs))
        self._arrived[action.stage, action.microbatch] = StageOutput(tensors=tensors, spec=spec)

    def _send_backward(self, action: Action, work: StageWork) -> None:
        gradients = self._returning.pop((action.stage, action.microbatch))
        present = [gradient for gradient in gradients if gradient is not None]
        self._send(action, present, [int(gradient is not None) for gradient in gradients])

    def _send(self, action: Action, tensors: list[Tensor], note: Any) -> None:
        edge = _edge(action)
        self._wire.send(edge, tensors, note)
        if self._is_continuous:
            self._sent_on.add(edge)

    def _receive_backward(self, action: Action, work: StageWork) -> None:
        tensors, present = self._receive(action)
        each = iter(tensors)
        self._gradients[action.stage, action.microbatch] = [next(each) if there else None for there in present]

    def _receive(self, action: Action) -> tuple[list[Tensor], Any]:
        edge = _edge(action)
        found = self._wire.receive(edge)
        self._expected[edge] -= 1
        if (self._expected[edge] or self._is_continuous) and self._wire.matches_tags:
            self._wire.expect(edge)
        return found

    def expect(self, actions: Iterable[Action]) -> None:
        """Announce all of the next actions.

        The first receive on each link is posted now; each later one is posted when the previous message has arrived.
        """
        self._expected = {}
        for action in actions:
            if action.op.is_receive:
                edge = _edge(action)
                self._expected[edge] = self._expected.get(edge, 0) + 1
        if self._wire.matches_tags:
            for edge in self._expected:
                if not self._wire.is_expected(edge):
                    self._wire.expect(edge)


def _edge(action: Action) -> StageLink:
    """Return the link of an action. Both sides derive its tag from the sending stage and the direction."""
    assert action.peer is not None
    message = action.message
    return StageLink(peer=action.peer, tag=2 * message.stage + int(message.kind is Op.BACKWARD))


def _nothing(action: Action, work: StageWork) -> None:
    return None
