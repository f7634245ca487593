"""Forward and backward passes over one rank's microbatches, one after another."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from paceline.errors import JobError
from paceline.step.generate import output_logits
from paceline.step.loss.batch_loss import gather_rows, mean_terms
from paceline.step.loss.loss_return_value import Terms
from paceline.step.microbatches import StepBatch
from paceline.step.replica_context import LocalMicrobatch, StepContext
from paceline.step.step_reduction import StepReduction, own_counts
from paceline.torch_internals.private_api import add_gradients
from paceline.torch_internals.pytree import to_device

See = Callable[[Any, Terms, Any], None]


class ForwardBackward(Protocol):
    """The runner of a step's microbatches, and of an evaluation's."""

    tells: bool
    """True if this rank reports the results for all ranks that see the same samples."""

    def run(self, given: StepBatch, *, step: int, stop: bool) -> tuple[StepReduction, bool]:
        """Run forward and backward of all microbatches and leave the gradients with the reducer.

        Returns the step's reduction vector, already sent, and whether gradients still have to be divided by its count.

        Raises:
            JobError: this way of running the microbatches does not support the loss.
        """

    def look(self, batch: Any, *, num_samples: int, see: See) -> None:
        """Run one microbatch forward without gradients; a rank that has the output calls `see(output, terms, data)`."""

    def call(self, model: nn.Module, tensor: Tensor) -> Tensor:
        """Return the model's output (its logits) for one tensor, computed without gradients, on every rank."""


class MicrobatchForwardBackward:
    """A runner that overlaps the all-reduce of the step's totals with the last backward.

    `alone`: the loss is divided by this replica's own counts.
    """

    def __init__(self, parts: StepContext, *, alone: bool = False) -> None:
        self._parts = parts
        self._alone = alone
        self.tells = parts.worlds.tp.rank == 0
        self._reporter = parts.loss_reporter(tells=self.tells)
        self._stand = IdleReplica(parts)

    def run(self, given: StepBatch, *, step: int, stop: bool) -> tuple[StepReduction, bool]:
        """Run each microbatch forward and backward."""
        data = [self._parts.load(micro.data) for micro in given.micro]
        counts = self._counts([portion.data for portion in data])
        missing = self._stand.missing(given)
        joint: StepReduction | None = None
        for position, (micro, batch) in enumerate(zip(given.micro, data, strict=True)):
            last = position == len(data) - 1
            terms = forward(self._parts, batch, step=step, index=micro.index, num_samples=micro.num_samples)
            joint = joint or self._reporter.joint(given, terms, stop=stop)
            self._reporter.put(joint, micro.index, terms)
            if last and not missing:
                self._reporter.send(joint)
            backward(self._parts, loss_for_backward(terms, counts), last=last and not missing, portion=batch)
        joint = self._stand_in(given, data, missing, joint, step=step, stop=stop)
        if not self._alone:
            joint.expect(counts or {})
        return joint, counts is None

    def _counts(self, data: Sequence[Any]) -> dict[str, Tensor] | None:
        if not (self._alone and self._parts.contract.counts_first):
            return self._reporter.counts(data)
        own = own_counts(self._parts.contract, data)
        return {name: torch.as_tensor(count) for name, count in own.items()}

    def call(self, model: nn.Module, tensor: Tensor) -> Tensor:
        """Return the logits of `model(tensor)`."""
        return output_logits(model(tensor))

    def look(self, batch: Any, *, num_samples: int, see: See) -> None:
        """Run the forward and compute the loss terms of one microbatch for an evaluation."""
        evaluate_microbatch(self._parts, batch, num_samples=num_samples, see=see)

    def _stand_in(
        self,
        given: StepBatch,
        data: Sequence[LocalMicrobatch],
        missing: int,
        joint: StepReduction | None,
        *,
        step: int,
        stop: bool,
    ) -> StepReduction:
        """Run the missing rounds with weight zero. As on every rank, the reduction vector is sent in the last round."""
        if not missing:
            if joint is None:
                joint = self._reporter.joint(given, None, stop=stop)
                self._reporter.send(joint)
            return joint
        spare = self._stand.spare(given, data)
        for number in range(missing):
            last = number == missing - 1
            with self._parts.weightless():
                terms = forward(self._parts, spare, step=step, index=given.num_micro, num_samples=0)
                joint = joint or self._reporter.joint(given, terms, stop=stop)
                if last:
                    self._reporter.send(joint)
                nothing = torch.stack([total for total, _ in terms.values()]).sum() * 0.0
                backward(self._parts, nothing, last=last, counts=False, portion=spare)
        assert joint is not None
        return joint


class IdleReplica:
    """A provider of stand-in microbatches for a replica without samples, if layers communicate across all replicas."""

    def __init__(self, parts: StepContext, *, always: bool = False) -> None:
        self._parts = parts
        self._meets = always or parts.needs_equal_microbatches
        self._spare: LocalMicrobatch | None = None

    def missing(self, given: StepBatch) -> int:
        """Return the number of rounds in which this replica has no sample and others do."""
        if not self._meets:
            return 0
        return -(-given.num_micro // self._parts.worlds.data.world_size) - len(given.micro)

    def spare(self, given: StepBatch, data: Sequence[LocalMicrobatch]) -> LocalMicrobatch:
        """Return a stand-in microbatch: one of this replica's own, or one of another replica's.

        Raises:
            JobError: the dataset is a stream, whose samples cannot be read twice.
        """
        if data:
            self._spare = data[0]
        elif self._spare is None and given.spare is not None:
            self._spare = self._parts.load(given.spare())
        if self._spare is None:
            raise JobError(
                f"the first batch has {given.num_micro} microbatches, fewer than there are replicas.",
                cause="layers that communicate over all replicas need a sample on each, and a "
                "stream can't be read twice",
                hint="a smaller --train.micro_batch_size, or --layout ddp --train.buffers fold",
            )
        return self._spare


class BatchForwardBackward:
    """A runner of one pass, which computes the loss of the whole batch on every replica that has a part of it."""

    def __init__(self, parts: StepContext) -> None:
        self._parts = parts
        self.tells = parts.worlds.tp.rank == 0
        self._columns: dict[str, bool] = {}
        self._reporter = parts.loss_reporter(tells=self.tells)

    def run(self, given: StepBatch, *, step: int, stop: bool) -> tuple[StepReduction, bool]:
        """Run the forward, gather the outputs of all replicas, and compute the same loss everywhere."""
        parts = self._parts
        output, batch, terms = None, None, None
        for micro in given.micro:
            batch = to_device(micro.data, parts.world.device)
            output = _output(parts, batch, step=step, index=micro.index)
        own = sum(micro.num_samples for micro in given.micro)
        whole = gather_rows(output, batch, world=parts.worlds.data, num_samples=own, columns=self._columns)
        if whole is not None:
            with open_all(parts.around_forward):
                terms = parts.contract.terms(*whole, num_samples=given.num_samples)
        joint = self._reporter.joint(given, terms, stop=stop)
        if terms is not None and given.micro[0].index == 0:  # all replicas have the same loss: one reports it
            self._reporter.put(joint, 0, terms)
        self._reporter.send(joint)
        if terms is not None:
            backward(parts, mean_terms(terms), last=True)
        elif parts.reducer.needs_equal_microbatches:  # gradients reduced during backward wait for this replica
            parts.reducer.before_backward(last=True, counts=False)
            parts.reducer.after_backward()
        return joint, False

    def call(self, model: nn.Module, tensor: Tensor) -> Tensor:
        """Return the logits of `model(tensor)`."""
        return output_logits(model(tensor))

    def look(self, batch: Any, *, num_samples: int, see: See) -> None:
        """Run the forward and compute the loss terms of this microbatch alone, for an evaluation."""
        evaluate_microbatch(self._parts, batch, num_samples=num_samples, see=see)


def evaluate_microbatch(parts: StepContext, batch: Any, *, num_samples: int, see: See) -> None:
    """Run one microbatch forward as in an evaluation, and pass output, terms and data to `see`."""
    portion = parts.portion(batch)
    with open_all(parts.around_forward):
        with portion.inside():
            output = parts.contract.forward(parts.model, portion.data)
        see(output, parts.contract.terms(output, portion.data, num_samples=num_samples), portion.data)


def forward(parts: StepContext, portion: LocalMicrobatch, *, step: int, index: int, num_samples: int) -> Terms:
    """Return one microbatch's loss terms, with its own random stream. Without samples, statistics are not updated."""
    for tape in parts.tapes:
        tape.at(index, counts=num_samples > 0)
    with open_all(parts.around_forward) as contexts:
        _begin_draws(parts, contexts, step=step, index=index)
        for tape in parts.tapes:
            contexts.enter_context(tape.watching())
        with portion.inside():
            output = parts.contract.forward(parts.model, portion.data)
        terms = parts.contract.terms(output, portion.data, num_samples=num_samples)
        parts.contract.answer_mean(output, portion.data, terms)
    if num_samples > 0:
        for tape in parts.tapes:
            tape.left(index)
    return terms


def _output(parts: StepContext, batch: Any, *, step: int, index: int) -> Any:
    for tape in parts.tapes:
        tape.at(index)
    with open_all(parts.around_forward) as contexts:
        _begin_draws(parts, contexts, step=step, index=index)
        return parts.contract.forward(parts.model, batch)


def open_all(contexts: Iterable[Callable[[], AbstractContextManager[Any]]]) -> ExitStack:
    """Return a stack in which all contexts are open, for a `with`."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        return stack.pop_all()


def _begin_draws(parts: StepContext, contexts: ExitStack, *, step: int, index: int) -> None:
    """Start the microbatch's random stream; threads that share the host's generators wait for their turn first."""
    if parts.turns is None:
        parts.streams.enter(step=step, microbatch=index)
    else:
        contexts.enter_context(parts.turns.forward(partial(parts.streams.enter, step=step, microbatch=index)))


def loss_for_backward(terms: Terms, counts: dict[str, Tensor] | None) -> Tensor:
    """Return the loss that backward runs on: the sum, or the sum of quotients if the global counts are known."""
    if counts is None:
        (total, _), *_ = terms.values()
        return total
    missing = sorted(set(terms) - set(counts))
    if missing:
        raise JobError(
            f"count= returns no count for the loss term {', '.join(missing)}.",
            hint=f"count=lambda batch: {{{missing[0]!r}: number, ...}}",
        )
    parts = [total / _not_zero(counts[name]).to(total.dtype) for name, (total, _) in terms.items()]
    return torch.stack(parts).sum() if len(parts) > 1 else parts[0]


def _not_zero(count: Tensor) -> Tensor:
    """Replace a count of zero by one: the sum is zero as well. If an empty batch is an error, the loss reports it."""
    return torch.where(count == 0, torch.ones_like(count), count)


def backward(
    parts: StepContext, loss: Tensor, *, last: bool, counts: bool = True, portion: LocalMicrobatch | None = None
) -> None:
    """Run the backward of one microbatch's `portion`; `last` marks this replica's last one in the step.

    A microbatch with `counts=False` adds nothing, but takes part in communication.
    """
    if not loss.requires_grad:
        raise no_gradient()
    parts.reducer.before_backward(last=last, counts=counts)
    turns = [] if parts.turns is None else [parts.turns.backward]
    again = [] if portion is None else [portion.again]
    with open_all([*turns, *(tape.watching for tape in parts.tapes), *again]):
        add_gradients([parts.update.scaled(loss)], [None])
    parts.reducer.after_backward()


def no_gradient() -> JobError:
    """Return the error for a loss that does not depend on any trainable parameter."""
    return JobError(
        "the loss does not depend on any trainable parameter.",
        cause="a detach(), .item() or torch.no_grad() inside the loss, or a frozen model",
        hint="return the loss as a tensor that the model's output flows into",
    )


def passes_of(parts: StepContext) -> ForwardBackward:
    """Return the forward-backward runner of this job, the same on every rank."""
    return BatchForwardBackward(parts) if parts.contract.over_batch else MicrobatchForwardBackward(parts)
