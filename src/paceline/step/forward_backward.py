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
from paceline.step.replica_context import LocalMicrobatch, ReplicaContext
from paceline.step.step_totals import TotalsReduction, local_counts
from paceline.torch_internals.private_api import run_backward
from paceline.torch_internals.pytree import to_device

OutputObserver = Callable[[Any, Terms, Any], None]
"""A function `on_output(output, terms, data)` that receives the results of a microbatch in an evaluation."""


class ForwardBackward(Protocol):
    """The interface of a runner: an object that runs a rank's microbatches, in training steps and in evaluations."""

    reports_loss: bool
    """True if this rank reports the loss for all ranks that process the same samples."""

    def run(self, step_batch: StepBatch, *, step: int, stop: bool) -> tuple[TotalsReduction, bool]:
        """Run forward and backward of all microbatches, and pass the gradients to the reducer.

        Return the step's totals, whose all-reduce has started, and True if the gradients must still be divided by the
        global count. If `stop`, this rank wants to stop after the step. The totals report that to all ranks.

        Raises:
            JobError: this runner does not support the loss.
        """

    def evaluate_microbatch(self, batch: Any, *, num_samples: int, on_output: OutputObserver) -> None:
        """Run the forward of one microbatch without gradients.

        Ranks that have the model's output call `on_output(output, terms, data)`.
        """

    def compute_logits(self, model: nn.Module, tensor: Tensor) -> Tensor:
        """Return the model's output (its logits) for one tensor, computed without gradients, on every rank."""


class MicrobatchForwardBackward:
    """A runner that runs microbatches one after another.

    The all-reduce of the step's totals overlaps with the last backward. If `divides_locally`, the loss is divided by
    this replica's own counts instead of the global counts.
    """

    def __init__(self, replica: ReplicaContext, *, divides_locally: bool = False) -> None:
        self._replica = replica
        self._divides_locally = divides_locally
        self.reports_loss = replica.worlds.tp.rank == 0
        self._totals_builder = replica.make_totals_builder(reports_loss=self.reports_loss)
        self._stand_ins = StandInMicrobatches(replica)

    def run(self, step_batch: StepBatch, *, step: int, stop: bool) -> tuple[TotalsReduction, bool]:
        """Run the forward and the backward of each microbatch."""
        local_microbatches = [self._replica.load_microbatch(microbatch.data) for microbatch in step_batch.micro]
        counts = self._gather_counts([part.data for local in local_microbatches for part in parts_of(local)])
        num_missing = self._stand_ins.count_missing(step_batch)
        reduction: TotalsReduction | None = None
        for position, (microbatch, local) in enumerate(zip(step_batch.micro, local_microbatches, strict=True)):
            is_last = position == len(local_microbatches) - 1 and not num_missing
            index, num_samples = microbatch.index, microbatch.num_samples
            terms = forward_parts(self._replica, local, step=step, index=index, num_samples=num_samples)
            reduction = reduction or self._totals_builder.new_reduction(step_batch, terms[0], stop=stop)
            for shard, part_terms in zip(self._replica.shard_numbers, terms, strict=True):
                self._totals_builder.store_terms(reduction, index, part_terms, shard=shard)
            if is_last:
                self._totals_builder.start_reduction(reduction)
            losses = [loss_for_backward(part_terms, counts) for part_terms in terms]
            backward_parts(self._replica, losses, last=is_last, microbatch=local)
        reduction = self._run_stand_ins(step_batch, local_microbatches, num_missing, reduction, step=step, stop=stop)
        if not self._divides_locally:
            reduction.set_expected_counts(counts or {})
        return reduction, counts is None

    def _gather_counts(self, data: Sequence[Any]) -> dict[str, Tensor] | None:
        """Return the counts that the loss is divided by, or None if they are not known before the forward."""
        if not (self._divides_locally and self._replica.contract.has_early_counts):
            return self._totals_builder.gather_counts(data)
        local = local_counts(self._replica.contract, data)
        return {name: torch.as_tensor(count) for name, count in local.items()}

    def compute_logits(self, model: nn.Module, tensor: Tensor) -> Tensor:
        """Return the logits of `model(tensor)`."""
        return output_logits(model(tensor))

    def evaluate_microbatch(self, batch: Any, *, num_samples: int, on_output: OutputObserver) -> None:
        """Run the forward and compute the loss terms of one microbatch for an evaluation."""
        evaluate_microbatch(self._replica, batch, num_samples=num_samples, on_output=on_output)

    def _run_stand_ins(
        self,
        step_batch: StepBatch,
        microbatches: Sequence[LocalMicrobatch],
        num_missing: int,
        reduction: TotalsReduction | None,
        *,
        step: int,
        stop: bool,
    ) -> TotalsReduction:
        """Run a stand-in for each missing microbatch, and return the step's totals.

        The all-reduce of the totals starts before the last backward.
        """
        if not num_missing:
            if reduction is None:
                reduction = self._totals_builder.new_reduction(step_batch, None, stop=stop)
                self._totals_builder.start_reduction(reduction)
            return reduction
        stand_in = self._stand_ins.load_stand_in(step_batch, microbatches)
        for number in range(num_missing):
            is_last = number == num_missing - 1
            with self._replica.zero_weight_context():
                terms = forward_parts(self._replica, stand_in, step=step, index=step_batch.num_micro, num_samples=0)
                reduction = reduction or self._totals_builder.new_reduction(step_batch, terms[0], stop=stop)
                if is_last:
                    self._totals_builder.start_reduction(reduction)
                losses = [torch.stack([total for total, _ in each.values()]).sum() * 0.0 for each in terms]
                backward_parts(self._replica, losses, last=is_last, has_samples=False, microbatch=stand_in)
        assert reduction is not None
        return reduction


class StandInMicrobatches:
    """The stand-ins of a replica: microbatches of weight zero that it runs if another replica has more microbatches.

    If layers communicate over replicas, every replica must run the same number of microbatches.
    """

    def __init__(self, replica: ReplicaContext, *, is_always_needed: bool = False) -> None:
        self._replica = replica
        self._is_needed = is_always_needed or replica.needs_equal_microbatches
        self._stand_in: LocalMicrobatch | None = None

    def count_missing(self, step_batch: StepBatch) -> int:
        """Return how many stand-ins this replica must run to reach the replica with the most microbatches."""
        if not self._is_needed:
            return 0
        return -(-step_batch.num_micro // self._replica.worlds.data.world_size) - len(step_batch.micro)

    def load_stand_in(self, step_batch: StepBatch, microbatches: Sequence[LocalMicrobatch]) -> LocalMicrobatch:
        """Return the microbatch to run as a stand-in.

        It is this replica's first microbatch of the step. If the replica has none, it is an earlier stand-in or a
        microbatch that is read from another replica's part of the batch.

        Raises:
            JobError: the dataset is a stream, whose samples cannot be read twice.
        """
        if microbatches:
            self._stand_in = microbatches[0]
        elif self._stand_in is None and step_batch.read_stand_in is not None:
            self._stand_in = self._replica.load_microbatch(step_batch.read_stand_in())
        if self._stand_in is None:
            raise JobError(
                f"this batch has {step_batch.num_micro} microbatches, fewer than there are replicas.",
                cause="layers that communicate over all replicas need a sample on each replica, and a "
                "stream can't be read twice",
                hint="a smaller --train.micro_batch_size, or --layout ddp --train.buffers fold",
            )
        return self._stand_in


class BatchForwardBackward:
    """A runner for a loss over the whole batch, which every replica with samples computes once per step."""

    def __init__(self, replica: ReplicaContext) -> None:
        self._replica = replica
        self.reports_loss = replica.worlds.tp.rank == 0
        self._known_columns: dict[str, bool] = {}  # by path: whether the value is a list with one entry per sample
        self._totals_builder = replica.make_totals_builder(reports_loss=self.reports_loss)

    def run(self, step_batch: StepBatch, *, step: int, stop: bool) -> tuple[TotalsReduction, bool]:
        """Run the forward, gather the outputs of all replicas, and compute the same loss everywhere."""
        replica = self._replica
        output, data, terms = None, None, None
        for micro in step_batch.micro:
            data = to_device(micro.data, replica.world.device)
            output = _run_model(replica, data, step=step, index=micro.index)
        num_local_samples = sum(micro.num_samples for micro in step_batch.micro)
        gathered = gather_rows(
            output, data, world=replica.worlds.data, num_samples=num_local_samples, known_columns=self._known_columns
        )
        if gathered is not None:
            with open_all(replica.forward_contexts):
                terms = replica.contract.terms(*gathered, num_samples=step_batch.num_samples)
        reduction = self._totals_builder.new_reduction(step_batch, terms, stop=stop)
        if terms is not None and step_batch.micro[0].index == 0:  # all replicas have the same loss; one reports it
            self._totals_builder.store_terms(reduction, 0, terms)
        self._totals_builder.start_reduction(reduction)
        if terms is not None:
            backward(replica, mean_terms(terms), last=True)
        elif replica.reducer.needs_equal_microbatches:  # the other replicas wait for this one during their backward
            replica.reducer.before_backward(last=True, has_samples=False)
            replica.reducer.after_backward()
        return reduction, False

    def compute_logits(self, model: nn.Module, tensor: Tensor) -> Tensor:
        """Return the logits of `model(tensor)`."""
        return output_logits(model(tensor))

    def evaluate_microbatch(self, batch: Any, *, num_samples: int, on_output: OutputObserver) -> None:
        """Run the forward and compute the loss terms of this microbatch alone, for an evaluation."""
        evaluate_microbatch(self._replica, batch, num_samples=num_samples, on_output=on_output)


def evaluate_microbatch(replica: ReplicaContext, batch: Any, *, num_samples: int, on_output: OutputObserver) -> None:
    """Run the forward of one microbatch in an evaluation, and pass output, terms and data to `on_output`.

    The sequence shards of exact context parallelism are passed one after another.
    """
    microbatch = replica.slice_microbatch(batch)
    if replica.exact_context is None:
        with open_all(replica.forward_contexts):
            on_output(*evaluate_part(replica, microbatch, num_samples=num_samples))
        return

    def evaluate_shard(position: int) -> tuple[Any, Terms, Any]:
        with open_all(replica.forward_contexts):
            return evaluate_part(replica, microbatch.shards[position], num_samples=num_samples)

    results = replica.exact_context.run(evaluate_shard, length=microbatch.length)
    with open_all(replica.forward_contexts):
        for output, terms, data in results:
            on_output(output, terms, data)


def evaluate_part(replica: ReplicaContext, part: LocalMicrobatch, *, num_samples: int) -> tuple[Any, Terms, Any]:
    """Run the forward of one part of a microbatch; return the output, its loss terms, and the part's data."""
    with part.forward_context():
        output = replica.contract.forward(replica.model, part.data)
    return output, replica.contract.terms(output, part.data, num_samples=num_samples), part.data


def parts_of(microbatch: LocalMicrobatch) -> Sequence[LocalMicrobatch]:
    """Return the parts of a microbatch that have their own forward: its sequence shards, or the microbatch itself."""
    return microbatch.shards or (microbatch,)


def forward(replica: ReplicaContext, microbatch: LocalMicrobatch, *, step: int, index: int, num_samples: int) -> Terms:
    """Run the forward of one microbatch in its own random stream and return its loss terms.

    A microbatch without samples (`num_samples=0`) is a stand-in. It does not change running statistics.
    """
    for recorder in replica.state_recorders:
        recorder.set_microbatch(index, has_samples=num_samples > 0)
    with open_all(replica.forward_contexts) as contexts:
        _enter_random_stream(replica, contexts, step=step, index=index)
        for recorder in replica.state_recorders:
            contexts.enter_context(recorder.recording_context())
        with microbatch.forward_context():
            output = replica.contract.forward(replica.model, microbatch.data)
        terms = replica.contract.terms(output, microbatch.data, num_samples=num_samples)
        replica.contract.run_sum_check(output, microbatch.data, terms)
    if num_samples > 0:
        for recorder in replica.state_recorders:
            recorder.end_forward(index)
    return terms


def forward_parts(
    replica: ReplicaContext, microbatch: LocalMicrobatch, *, step: int, index: int, num_samples: int
) -> list[Terms]:
    """Run the forwards of all parts of a microbatch like `forward`, and return the loss terms of each part."""
    if replica.exact_context is None:
        return [forward(replica, microbatch, step=step, index=index, num_samples=num_samples)]
    for recorder in replica.state_recorders:
        recorder.set_microbatch(index, has_samples=num_samples > 0)
    replica.random_streams.enter(step=step, microbatch=index)

    def forward_shard(position: int) -> Terms:
        shard = microbatch.shards[position]
        with open_all(replica.forward_contexts):
            with shard.forward_context():
                output = replica.contract.forward(replica.model, shard.data)
            terms = replica.contract.terms(output, shard.data, num_samples=num_samples)
            replica.contract.run_sum_check(output, shard.data, terms)
        return terms

    terms = replica.exact_context.run(forward_shard, is_training=True, length=microbatch.length)
    if num_samples > 0:
        for recorder in replica.state_recorders:
            recorder.end_forward(index)
    return terms


def _run_model(replica: ReplicaContext, batch: Any, *, step: int, index: int) -> Any:
    """Run the forward of one microbatch in its own random stream and return the model's output."""
    for recorder in replica.state_recorders:
        recorder.set_microbatch(index)
    with open_all(replica.forward_contexts) as contexts:
        _enter_random_stream(replica, contexts, step=step, index=index)
        return replica.contract.forward(replica.model, batch)


def open_all(contexts: Iterable[Callable[[], AbstractContextManager[Any]]]) -> ExitStack:
    """Enter the contexts that these functions return. Return a stack that exits them at the end of a `with` block."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context())
        return stack.pop_all()


def _enter_random_stream(replica: ReplicaContext, contexts: ExitStack, *, step: int, index: int) -> None:
    """Start the microbatch's random stream. Threads that share the host's generators first wait for their turn."""
    if replica.rng_turns is None:
        replica.random_streams.enter(step=step, microbatch=index)
    else:
        contexts.enter_context(
            replica.rng_turns.forward_context(partial(replica.random_streams.enter, step=step, microbatch=index))
        )


def loss_for_backward(terms: Terms, counts: dict[str, Tensor] | None) -> Tensor:
    """Return the loss that backward runs on: all terms added up, each divided by its entry in `counts`.

    If `counts` is None, there is only one term, and it is not divided.
    """
    if counts is None:
        (total, _), *_ = terms.values()
        return total
    missing = sorted(set(terms) - set(counts))
    if missing:
        raise JobError(
            f"count= returns no count for the loss term {', '.join(missing)}.",
            hint=f"count=lambda batch: {{{missing[0]!r}: number, ...}}",
        )
    quotients = [total / _replace_zeros(counts[name]).to(total.dtype) for name, (total, _) in terms.items()]
    return torch.stack(quotients).sum() if len(quotients) > 1 else quotients[0]


def _replace_zeros(count: Tensor) -> Tensor:
    """Return `count`, or one if it is zero, to divide by.

    A microbatch without targets has the sum zero, so its quotient is zero. If the count of the whole global batch is
    zero, `OptimizerUpdate.refuse_empty_batch` reports it.
    """
    return torch.where(count == 0, torch.ones_like(count), count)


def backward(
    replica: ReplicaContext,
    loss: Tensor,
    *,
    last: bool,
    has_samples: bool = True,
    microbatch: LocalMicrobatch | None = None,
) -> None:
    """Run the backward of one microbatch. `last`: this is the replica's last backward of the step.

    A stand-in (`has_samples=False`) adds no gradient, but takes part in communication.
    """
    if not loss.requires_grad:
        raise no_gradient_error()
    replica.reducer.before_backward(last=last, has_samples=has_samples)
    rng_contexts = [] if replica.rng_turns is None else [replica.rng_turns.backward_context]
    recording_contexts = [recorder.recording_context for recorder in replica.state_recorders]
    microbatch_contexts = [] if microbatch is None else [microbatch.backward_context]
    with open_all([*rng_contexts, *recording_contexts, *microbatch_contexts]):
        run_backward([replica.update.scale_loss(loss)], [None])
    replica.reducer.after_backward()


def backward_parts(
    replica: ReplicaContext,
    losses: Sequence[Tensor],
    *,
    last: bool,
    has_samples: bool = True,
    microbatch: LocalMicrobatch,
) -> None:
    """Run the backwards of all parts of a microbatch like `backward`. `losses` has the loss of each part."""
    if replica.exact_context is None:
        backward(replica, losses[0], last=last, has_samples=has_samples, microbatch=microbatch)
        return
    if not all(loss.requires_grad for loss in losses):
        raise no_gradient_error()
    replica.reducer.before_backward(last=last, has_samples=has_samples)

    def backward_shard(position: int) -> None:
        with microbatch.shards[position].backward_context():
            run_backward([replica.update.scale_loss(losses[position])], [None])

    replica.exact_context.run(backward_shard)
    replica.reducer.after_backward()


def no_gradient_error() -> JobError:
    """Return the error for a loss that does not depend on any trainable parameter."""
    return JobError(
        "the loss does not depend on any trainable parameter.",
        cause="a detach(), .item() or torch.no_grad() inside the loss, or a frozen model",
        hint="return the loss as a tensor that the model's output flows into",
    )


def build_forward_backward(replica: ReplicaContext) -> ForwardBackward:
    """Return the runner for this job's loss. Every rank gets a runner of the same class."""
    return BatchForwardBackward(replica) if replica.contract.over_batch else MicrobatchForwardBackward(replica)
