"""The interpreter of pipeline programs: one for all schedules, for training and for forward-only passes."""

import time
from collections.abc import Callable, Iterable, Sequence
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

StageMicrobatch = tuple[int, int]
"""A stage and a microbatch."""
ActionObserver = Callable[[Action, float, float], None]
"""A function `on_action(action, start_time, end_time)`."""


class StageWork(Protocol):
    """The interface of the work at a stage. The interpreter decides when each part of the work runs."""

    def forward(
        self, *, stage: int, microbatch: int, received: StageOutput | None
    ) -> StageOutput | Tensor | list[Tensor] | None:
        """Run one microbatch through one stage. Return the output for the next stage, or on the last stage the loss.

        With several parts of a microbatch, the last stage returns a list of losses. A forward-only program ignores the
        result of the last stage.
        """

    def backward_context(self, *, microbatch: int) -> AbstractContextManager[None]:
        """Return the context for a backward or half a backward. In it, recomputation sees the state of the forward."""

    def run_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *, microbatch: int) -> None:
        """Run a full backward from these outputs of a stage, in its context."""

    def before_backward(self, *, stage: int, microbatch: int) -> None:
        """Prepare for the weight gradients of the backward that runs next.

        If a backward is split into two actions, only the second action (BACKWARD_WEIGHT) adds weight gradients.
        """

    def after_backward(self, *, stage: int, microbatch: int) -> None:
        """Process the weight gradients that the backward has added."""


@dataclass(kw_only=True)
class _PendingBackward:
    """The state of a microbatch at a stage between its forward and its backward."""

    inputs: list[Tensor] = field(default_factory=list)
    outputs: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    deferred: DeferredWeightGrad | None = None


class Pipeline:
    """An interpreter of one rank's part of a program. `world` has the ranks of the program.

    `splits_backward=False` runs a stage's full backward at BACKWARD_INPUT and does nothing at BACKWARD_WEIGHT. It is
    used for stages that recompute or are sharded, whose backward cannot be split.

    If `is_continuous`, the caller repeats `expect_actions` and `run_action` until `pause`. Then a receive is always
    posted on each link, if the channel can post receives early (`StageChannel.matches_tags`).
    """

    def __init__(
        self,
        program: Program,
        *,
        world: World,
        splits_backward: bool = True,
        is_continuous: bool = False,
        on_action: ActionObserver | None = None,
    ) -> None:
        if program.num_ranks != world.world_size:
            raise LayoutError(
                f"the schedule {program.name} is for {program.num_ranks} ranks, but the pipeline "
                f"has {world.world_size}."
            )
        self.program = program
        self._rank = world.rank
        self._on_action = on_action
        self._is_continuous = is_continuous
        self._channel = StageChannel(world, channel=int(is_continuous))
        self._used_links: set[StageLink] = set()
        self._local_stages = set(program.stages_of(world.rank))
        self._pending: dict[StageMicrobatch, _PendingBackward] = {}
        # activations, and the gradients of outputs and inputs, that wait for the next action of their stage
        self._inputs: dict[StageMicrobatch, StageOutput] = {}
        self._outputs: dict[StageMicrobatch, StageOutput] = {}
        self._output_gradients: dict[StageMicrobatch, list[Tensor | None]] = {}
        self._input_gradients: dict[StageMicrobatch, list[Tensor | None]] = {}
        self._num_expected_messages: dict[StageLink, int] = {}
        self._handlers: dict[Op, Callable[[Action, StageWork], None]] = {
            Op.FORWARD: self._forward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input if splits_backward else self._backward,
            Op.BACKWARD_WEIGHT: self._backward_weight if splits_backward else _skip,
            Op.SEND_F: self._send_forward,
            Op.RECV_F: self._receive_forward,
            Op.SEND_B: self._send_backward,
            Op.RECV_B: self._receive_backward,
        }

    @property
    def sent_bytes(self) -> int:
        """The bytes that this rank has sent so far."""
        return self._channel.sent_bytes

    def run(self, work: StageWork) -> None:
        """Run one step's microbatches. Each parameter's `.grad` receives the sum over microbatches, without division.

        Raises:
            JobError: the last stage's loss does not depend on the weights.
        """
        actions = self.program.actions[self._rank]
        self.expect_actions(actions)
        try:
            with nullcontext() if self.program.has_backward else torch.no_grad():
                for action in actions:
                    self.run_action(action, work)
            self.finish()
        finally:
            for store in (self._pending, self._inputs, self._outputs, self._output_gradients, self._input_gradients):
                store.clear()

    def finish(self) -> None:
        """Wait until all sends have completed."""
        self._channel.finish()

    def pause(self) -> None:
        """Cancel the posted receives. All ranks call this after the same part of the program."""
        self._channel.cancel_receives(
            used_links=sorted(self._used_links, key=lambda link: link.tag) if self._channel.matches_tags else ()
        )
        self._used_links.clear()

    def run_action(self, action: Action, work: StageWork) -> None:
        """Run one of the actions given to `expect_actions`."""
        if self._on_action is None:
            self._handlers[action.op](action, work)
            return
        start_time = time.perf_counter()
        self._handlers[action.op](action, work)
        self._on_action(action, start_time, time.perf_counter())

    # -- compute

    def _forward(self, action: Action, work: StageWork) -> None:
        """Run a forward, store its output for the next stage, and keep its graph for the backward."""
        key = (action.stage, action.microbatch)
        received = self._inputs.pop(key, None)
        output = work.forward(stage=action.stage, microbatch=action.microbatch, received=received)
        inputs = [] if received is None else [t for t in received.tensors if t.requires_grad]
        if isinstance(output, StageOutput):
            self._store_output(key, output)
            outputs = [tensor for tensor in output.tensors if tensor.requires_grad]
        else:
            outputs = [] if output is None else output if isinstance(output, list) else [output]
            if self.program.has_backward and not any(tensor.requires_grad for tensor in outputs):
                raise JobError(
                    "the loss does not depend on any trainable parameter of any stage.",
                    hint="return the loss as a tensor that the model's output flows into",
                )
        if self.program.has_backward:
            self._pending[key] = _PendingBackward(inputs=inputs, outputs=outputs)

    def _store_output(self, key: StageMicrobatch, output: StageOutput) -> None:
        next_key = (key[0] + 1, key[1])
        if next_key[0] in self._local_stages:
            self._inputs[next_key] = output.as_stage_input()
        else:
            self._outputs[key] = output

    def _backward(self, action: Action, work: StageWork) -> None:
        key = (action.stage, action.microbatch)
        pending = self._take_pending(key)
        work.before_backward(stage=action.stage, microbatch=action.microbatch)
        if pending.outputs:
            work.run_backward(pending.outputs, pending.gradients, microbatch=action.microbatch)
        self._store_input_gradients(key, [tensor.grad for tensor in pending.inputs])
        work.after_backward(stage=action.stage, microbatch=action.microbatch)

    def _backward_input(self, action: Action, work: StageWork) -> None:
        key = (action.stage, action.microbatch)
        pending = self._take_pending(key)
        with work.backward_context(microbatch=action.microbatch):
            result = (
                backward_input(pending.outputs, pending.gradients, pending.inputs)
                if pending.outputs
                else ([], DeferredWeightGrad())
            )
        gradients, deferred = result
        self._store_input_gradients(key, gradients)
        self._pending[key] = _PendingBackward(deferred=deferred)

    def _backward_weight(self, action: Action, work: StageWork) -> None:
        pending = self._pending.pop((action.stage, action.microbatch))
        assert pending.deferred is not None, "BACKWARD_WEIGHT comes after BACKWARD_INPUT"
        work.before_backward(stage=action.stage, microbatch=action.microbatch)
        with work.backward_context(microbatch=action.microbatch):
            backward_weight(pending.deferred)
        work.after_backward(stage=action.stage, microbatch=action.microbatch)

    def _take_pending(self, key: StageMicrobatch) -> _PendingBackward:
        """Remove and return the pending backward, with only those outputs that have a gradient.

        A loss is an output without a received gradient. It stays, with the gradient None.
        """
        pending = self._pending.pop(key)
        gradients = self._output_gradients.pop(key, None)
        if gradients is None:
            pending.gradients = [None] * len(pending.outputs)
            return pending
        pairs = [(out, g) for out, g in zip(pending.outputs, gradients, strict=True) if g is not None]
        pending.outputs, pending.gradients = [out for out, _ in pairs], [g for _, g in pairs]
        return pending

    def _store_input_gradients(self, key: StageMicrobatch, gradients: list[Tensor | None]) -> None:
        previous_key = (key[0] - 1, key[1])
        if previous_key[0] in self._local_stages:
            self._output_gradients[previous_key] = gradients
        elif previous_key[0] >= 0:
            self._input_gradients[key] = gradients

    # -- messages

    def _send_forward(self, action: Action, work: StageWork) -> None:
        output = self._outputs.pop((action.stage, action.microbatch))
        requires_grad = [int(tensor.requires_grad) for tensor in output.tensors]
        self._send(action, output.tensors, [output.spec, requires_grad])

    def _receive_forward(self, action: Action, work: StageWork) -> None:
        tensors, (spec, requires_grad) = self._receive(action)
        for tensor, needs_grad in zip(tensors, requires_grad, strict=True):
            tensor.requires_grad_(bool(needs_grad))
        self._inputs[action.stage, action.microbatch] = StageOutput(tensors=tensors, spec=spec)

    def _send_backward(self, action: Action, work: StageWork) -> None:
        gradients = self._input_gradients.pop((action.stage, action.microbatch))
        sent = [gradient for gradient in gradients if gradient is not None]
        self._send(action, sent, [int(gradient is not None) for gradient in gradients])

    def _send(self, action: Action, tensors: list[Tensor], note: Any) -> None:
        link = _link_of(action)
        self._channel.send(link, tensors, note)
        if self._is_continuous:
            self._used_links.add(link)

    def _receive_backward(self, action: Action, work: StageWork) -> None:
        tensors, has_gradients = self._receive(action)
        remaining = iter(tensors)
        self._output_gradients[action.stage, action.microbatch] = [
            next(remaining) if has_gradient else None for has_gradient in has_gradients
        ]

    def _receive(self, action: Action) -> tuple[list[Tensor], Any]:
        link = _link_of(action)
        message = self._channel.receive(link)
        self._num_expected_messages[link] -= 1
        if (self._num_expected_messages[link] or self._is_continuous) and self._channel.matches_tags:
            self._channel.post_receive(link)
        return message

    def expect_actions(self, actions: Iterable[Action]) -> None:
        """Announce all actions of the next calls of `run_action`.

        If the channel can post receives early (`StageChannel.matches_tags`), post the first receive on each link now.
        Each later receive is then posted when the previous message on its link has arrived.
        """
        self._num_expected_messages = {}
        for action in actions:
            if action.op.is_receive:
                link = _link_of(action)
                self._num_expected_messages[link] = self._num_expected_messages.get(link, 0) + 1
        if self._channel.matches_tags:
            for link in self._num_expected_messages:
                if not self._channel.has_posted_receive(link):
                    self._channel.post_receive(link)


def _link_of(action: Action) -> StageLink:
    """Return the link of an action. Both sides derive the link's tag from the sending stage and the direction."""
    assert action.peer is not None
    message = action.message
    return StageLink(peer=action.peer, tag=2 * message.stage + int(message.kind is Op.BACKWARD))


def _skip(action: Action, work: StageWork) -> None:
    return None
