"""Logging and checks of finished steps. Results are read `lag` steps late, so logging never synchronises the device."""

from collections import deque

from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.events import EventBus, Note, StepDone
from paceline.parallel.data_parallel.reducer import unused_parameters_note
from paceline.step.step_totals import StepResult
from paceline.trainer.checks.evaluation_checks import refuse_unknown_metrics
from paceline.trainer.diagnostics.parameter_statistics import statistics
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.duration import Clock, Pace, Progress, peak_gib


class StepLogger:
    """A log of step results, equal on every rank. `is_stop_requested` is True once any rank requests a stop."""

    def __init__(self, *, built: TrainingSetup, feed: BatchLoader, event_bus: EventBus, progress: Progress) -> None:
        self.clock = Clock()
        self.last: StepResult | None = None
        self.stops = False
        self._built = built
        self._update = built.update
        self._feed = feed
        self._event_bus = event_bus
        self._progress = progress
        self._under_way: deque[tuple[StepResult, Cursor]] = deque()
        self._cursor = Cursor()
        self._logged = -1
        self._tokens_heard, self._samples_heard = 0.0, 0
        self._pace = Pace()

    def record(self, result: StepResult, *, cursor: Cursor) -> None:
        """Add a step that ends at `cursor`, and process the results that are at least `lag` steps old."""
        self._under_way.append((result, cursor))
        self._take(result)
        self._hear(leave=self._built.step.lag)

    def flush(self) -> None:
        """Process all outstanding results; no step may be in flight."""
        self._hear(leave=0)

    def log_last(self) -> None:
        """Log the last step, whether or not it falls on `log.every`."""
        if self.last is not None and self._logged != self.last.step:
            self._log(self.last)

    def _hear(self, *, leave: int) -> None:
        while len(self._under_way) > leave:
            result, self._cursor = self._under_way.popleft()
            reduced = result.reduced
            reduced.check_counts()
            self._update.refuse_empty(step=result.step, loss=reduced.loss, counts=reduced.counts)
            if self.last is None:
                refuse_unknown_metrics(self._built.job, terms=result.terms)
            self.last = result
            self.stops = self.stops or reduced.stop
            self._count(result)
            if result.step % self._built.settings.log.every == 0 or result.step == 1:
                self._log(result)

    def _take(self, result: StepResult) -> None:
        """Add a step to the clock when it runs, because delayed results arrive several at a time."""
        clock = self.clock
        clock.steps += 1
        clock.samples += result.samples
        clock.compute += result.compute_seconds
        clock.communication += result.communication_seconds

    def _count(self, result: StepResult) -> None:
        tokens = max(result.reduced.counts.values(), default=0.0)
        self._tokens_heard += tokens
        self._samples_heard += result.samples
        self._progress.tokens += tokens

    def _log(self, result: StepResult) -> None:
        self._logged = result.step
        built, clock, cursor = self._built, self.clock, self._cursor
        if clock.steps:
            self._pace, self.clock = clock.pace(), Clock()
        pace = self._pace
        rate = self._tokens_heard / max(self._samples_heard, 1)
        has_tokens = self._tokens_heard != self._samples_heard
        self._tokens_heard, self._samples_heard = 0.0, 0
        self._event_bus.emit(
            StepDone(
                step=result.step,
                epoch=self._epoch(cursor),
                samples=cursor.samples,
                loss=result.loss,
                terms=result.terms,
                grad_norm=result.grad_norm,
                lr=built.update.lr if result.lr is None else result.lr,
                step_seconds=pace.step_seconds,
                data_seconds=pace.data_seconds,
                compute_seconds=pace.compute_seconds,
                communication_seconds=pace.communication_seconds,
                checkpoint_seconds=clock.saving / clock.steps if clock.steps else 0.0,
                evaluation_seconds=clock.evaluating / clock.steps if clock.steps else 0.0,
                samples_per_second=pace.samples_per_second,
                tokens_per_second=rate * pace.samples_per_second if has_tokens else None,
                memory_peak_gib=peak_gib(built.world.device),
                sent_bytes=built.step.sent_bytes,
                statistics=statistics(built) if built.settings.log.statistics else {},
            )
        )
        self._warn(first=result.step == 1)

    def _warn(self, *, first: bool) -> None:
        """Emit the warnings of this step."""
        text = unused_parameters_note(self._built.named) if first else ""
        replica = self._built.step.replica
        mean = replica.contract.note if first else ""
        notes = [*filter(None, (text, mean)), *replica.buffers.new_notes()]
        for note in [*notes, *(note for tape in replica.tapes for note in tape.new_notes())]:
            self._event_bus.emit(Note(text=note, level="warning"))

    def _epoch(self, cursor: Cursor) -> float:
        if self._feed.num_samples is None:
            return float(cursor.epoch)
        return cursor.epoch + cursor.position / self._feed.num_samples
