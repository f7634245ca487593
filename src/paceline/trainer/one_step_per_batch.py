"""A guard that gives each batch of a run one step, although the user may write several loops one after another."""

from collections.abc import Iterator

from paceline.data.loader import BatchLoader
from paceline.data.types import StepInput
from paceline.errors import RunError, UsageError


class BatchGuard:
    """A guard that yields the next batch only after the step on the previous batch, so no batch is lost or repeated.

    `pending_batch` is the batch that the next step must use. The training loop sets it to None after the step.
    """

    def __init__(self, loader: BatchLoader) -> None:
        self._loader = loader
        self._batches: Iterator[StepInput] | None = None
        self.pending_batch: StepInput | None = None
        self._num_loops = 0

    def iterate(self) -> Iterator[StepInput]:
        """Yield batches from the current position, first a batch that an earlier loop left without a step.

        Raises:
            UsageError: no step was run on the previous batch, or a newer loop was started.
        """
        self._num_loops += 1
        loop_number = self._num_loops
        if self.pending_batch is not None:
            yield self.pending_batch
        while True:
            if loop_number != self._num_loops:
                raise UsageError(
                    "this loop over run.batches() has ended: a newer loop was started.",
                    cause="two iterators of run.batches() in alternation; they share the samples",
                    hint="one at a time: leave the first with break, then use the second",
                )
            if self.pending_batch is not None:
                raise UsageError(
                    f"the batch of step {self.pending_batch.batch.next_cursor.step} was taken from run.batches() "
                    "but not stepped.",
                    cause="a continue before run.step(batch), or list(run.batches())",
                    hint="for batch in run.batches(): run.step(batch); skip samples in train_data or order=",
                )
            self.pending_batch = self._read_next()
            yield self.pending_batch

    def check(self, step_batch: StepInput) -> None:
        """Check that this is the batch that the next step must use. The user may have changed its data.

        Raises:
            UsageError: a step was already run on the batch, or the batch is not the latest one.
        """
        if self.pending_batch is not None and step_batch.batch.next_cursor == self.pending_batch.batch.next_cursor:
            return
        step = step_batch.batch.next_cursor.step
        is_later_step = self.pending_batch is not None and step >= self.pending_batch.batch.next_cursor.step
        raise UsageError(
            f"this batch is not the latest one from run.batches(): it belongs to step {step}."
            if is_later_step
            else f"this batch was already stepped: it belongs to step {step}.",
            cause="a batch from another run"
            if is_later_step
            else "run.step(batch) was called twice with one batch, or with a batch kept from an earlier step",
            hint="for batch in run.batches(): run.step(batch), once",
        )

    def _read_next(self) -> StepInput:
        """Return the next batch from the loader."""
        if self._batches is None:
            self._batches = iter(self._loader)
        step_batch = next(self._batches, None)
        if step_batch is None:  # a loader is endless, unless it has raised an error
            raise RunError(
                "the data of this run can't be read any further: an earlier read failed.",
                hint="let the first error end the run; when started again, it resumes from its last checkpoint",
            )
        return step_batch
