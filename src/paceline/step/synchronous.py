"""The synchronous training step: replicas run their microbatches, all-reduce gradients and apply the same update."""

import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from paceline.errors import JobError
from paceline.launch.failures.failure_record import annotate_progress
from paceline.parallel.data_parallel.exact_reduction import no_grid_error
from paceline.step.forward_backward import ForwardBackward, build_forward_backward
from paceline.step.microbatches import StepBatch
from paceline.step.optimizer_update import DeferredFiniteCheck
from paceline.step.replica_context import ReplicaContext
from paceline.step.step_totals import AsyncScalars, StepResult, TotalsReduction
from paceline.torch_internals.private_api import tensor_version

MAX_ATTEMPTS = 8  # how often one step is computed at most; exact mode repeats a step to choose new exponents


class SynchronousStep:
    """A synchronous training step. Every rank runs the same program, and `run` updates all ranks or none.

    `lag` is the number of further steps after which a step is finished and its result is read; here it is 0.
    """

    lag = 0

    def __init__(self, replica: ReplicaContext, *, forward_backward: ForwardBackward | None = None) -> None:
        self.replica = replica
        self.steps_done = 0
        self.deferred_finite_check = DeferredFiniteCheck(replica.update)
        self.forward_backward = forward_backward or build_forward_backward(replica)
        self._needs_write_check = replica.world.world_size > 1 or replica.exact

    def run(self, step_batch: StepBatch, *, stop: bool = False) -> StepResult:
        """Run one step, from the forwards to the update. If `stop`, this rank wants to stop after the step.

        Raises:
            NonFiniteError: the loss or a gradient is not finite, and the run is set to stop on that.
            SpikeError: the loss or the gradient norm is a spike, and the run is set to stop on that.
            DesyncError: the ranks disagree on the loss terms or on the data.
        """
        if not self.replica.model.training:
            self.replica.model.train()
        result = self.compute_gradients(step_batch, stop=stop)
        reads_loss_now = self.replica.world.device.type == "cpu" or self.replica.update.needs_loss_before_update
        if reads_loss_now:
            self._commit_update(result, result.loss, result.totals.counts)
        else:
            self._commit_update(result, None, None)
        return result

    def _commit_update(self, result: StepResult, loss: float | None, counts: Mapping[str, float] | None) -> None:
        """Update the weights. If `loss` is None, it was not read yet, and the previous step is checked instead."""
        start_time = time.perf_counter()
        nonfinite_terms = () if loss is None else result.totals.nonfinite_terms
        grad_norm, is_applied = self.replica.update.commit(
            step=self.steps_done + 1, loss=loss, counts=counts, nonfinite_terms=nonfinite_terms
        )
        if not is_applied:
            for recorder in self.replica.state_recorders:
                recorder.end_skipped_step()
            self.replica.undo_reduction()
        self.steps_done += 1
        result.async_grad_norm = None if grad_norm is None else AsyncScalars(grad_norm)
        result.skipped = not is_applied
        result.compute_seconds += time.perf_counter() - start_time
        if loss is None:
            self.deferred_finite_check.check(result)

    def finish_pending(self) -> None:
        """Complete every step that is still in flight. Every rank calls this."""

    def flush_reports(self) -> None:
        """Send all buffered results now, because one rank may read a result next while the others do not."""

    @property
    def sent_bytes(self) -> float | None:
        """The number of bytes that this rank has sent. None under ZeRO-3, because torch does not count its messages."""
        worlds = self.replica.worlds
        return None if worlds.mesh.zero == 3 and worlds.shard.world_size > 1 else worlds.all_ranks.traffic.sent_bytes

    @property
    def num_retained_batches(self) -> int:
        """The number of recent batches that the loop keeps, because a delayed finite check may report one of them."""
        return 2 + self.lag

    @property
    def has_delayed_results(self) -> bool:
        """True if ranks read the result of a step at different times, so that reading it must start no collective."""
        return bool(self.lag)

    def synchronized_weights(self) -> AbstractContextManager[dict[str, Tensor]]:
        """Return a context in which the model has the weights to evaluate, save or export.

        If this rank trains weights of its own (local SGD), the context yields them by name. Otherwise it yields an
        empty dict.
        """
        return nullcontext({})

    def collect_staleness(self) -> Sequence[Mapping[str, Any]] | None:
        """Return the gradient staleness (`events.Staleness`) of each worker that this process reports for.

        The result is None, on all ranks, if gradients cannot be stale.
        """
        return None

    def new_notes(self) -> list[str]:
        """Return the notes about processes outside this world that were not returned before."""
        return []

    def compute_gradients(self, step_batch: StepBatch, *, stop: bool = False) -> StepResult:
        """Compute the global gradient into every `.grad`. Apart from gradients, only buffers change."""
        start_time = time.perf_counter()
        for _ in range(MAX_ATTEMPTS):
            for recorder in self.replica.state_recorders:
                recorder.begin_step(num_micro=step_batch.num_micro)
            self.replica.reducer.begin()
            versions_before = self._parameter_versions()
            try:
                reduction, needs_division = self.forward_backward.run(step_batch, step=self.steps_done, stop=stop)
            except BaseException as error:
                self._annotate_error(error, versions_before)
                raise
            backward_end = time.perf_counter()
            self._refuse_writes(versions_before)
            if not self.replica.reducer.finish(divisor=reduction.divisor() if needs_division else None):
                continue
            if all(recorder.fold(num_micro=step_batch.num_micro) for recorder in self.replica.state_recorders):
                break
            self.replica.undo_reduction()
            self.replica.buffers.undo()
        else:
            raise no_grid_error(step=self.steps_done + 1, num_tries=MAX_ATTEMPTS)
        self._synchronize_buffers(reduction)
        end_time = time.perf_counter()
        return StepResult(
            step=self.steps_done + 1,
            samples=step_batch.num_samples,
            reduction=reduction,
            async_grad_norm=None,
            compute_seconds=backward_end - start_time,
            communication_seconds=end_time - backward_end,
        )

    def _annotate_error(self, error: BaseException, versions_before: list[int]) -> None:
        """Add to the error which units this rank has run. If a forward wrote to a weight, raise a JobError instead."""
        order_check = getattr(self.replica.reducer, "order_check", None)
        if order_check is not None:
            annotate_progress(error, order_check.describe_progress())
        if isinstance(error, RuntimeError) and "modified by an inplace operation" in str(error):
            self._refuse_writes(versions_before)

    def close(self) -> None:
        """Remove the hooks that the step installed in the model."""
        self.replica.reducer.close()
        for recorder in self.replica.state_recorders:
            recorder.close()

    def _parameter_versions(self) -> list[int]:
        """Return the parameters' version counters, which show writes by a forward.

        Return an empty list if the check is not needed or was done in an earlier step.
        """
        if not self._needs_write_check:
            return []
        return [tensor_version(parameter) for parameter in self.replica.model.parameters()]

    def _refuse_writes(self, versions_before: list[int]) -> None:
        """Raise an error if a parameter was written to since `versions_before`."""
        if not versions_before:
            return
        versions_after, self._needs_write_check = self._parameter_versions(), False
        pairs = zip(self.replica.model.named_parameters(), versions_before, versions_after, strict=False)
        written_parameters = [(name, parameter) for (name, parameter), old, new in pairs if old != new]
        if written_parameters:
            name, parameter = written_parameters[0]
            raise parameter_write_error(name, is_trainable=parameter.requires_grad)

    def _synchronize_buffers(self, reduction: TotalsReduction) -> None:
        """Make the buffers equal on all ranks if a buffer has changed.

        On a CPU, the all-reduced flag shows whether one has changed on any rank. On a GPU, reading that flag would
        wait for the device, so each rank checks its own buffers.
        """
        totals = reduction.wait_for_totals() if self.replica.world.device.type == "cpu" else None
        for buffers in self.replica.watched_buffers:
            buffers.synchronize(is_changed=buffers.has_changed() if totals is None else totals.buffers_changed)


def parameter_write_error(name: str, *, is_trainable: bool = True) -> JobError:
    """Return the error for a forward that writes to a parameter. A frozen parameter suggests a momentum teacher."""
    if not is_trainable:
        return JobError(
            f"the forward writes to the parameter {name}, which is not trained: each rank would write to it once for "
            "each of its own microbatches.",
            cause="a momentum teacher (BYOL, DINO, MoCo, data2vec) that is updated in the forward",
            hint="update it after each step: Job(on_update=lambda model, step: ...); or --ranks 1",
        )
    return JobError(
        f"the forward writes to the parameter {name}: each replica would write different values.",
        cause="nn.Embedding(max_norm=...), or a forward that assigns to its weights",
        hint="F.normalize(self.weight) where it is used, Job(on_update=lambda model, step: ...) for changes made once "
        "after each update, or --ranks 1 without --train.exact",
    )
