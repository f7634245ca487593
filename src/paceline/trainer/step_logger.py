"""Logs and checks of finished steps. Results are read `lag` steps late, when an asynchronous step has finished them."""

from collections import deque

from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.events import EventBus, Note, Staleness, StepDone
from paceline.parallel.data_parallel.reducer import unused_parameters_note
from paceline.step.step_totals import StepResult
from paceline.trainer.checks.evaluation_checks import refuse_unknown_metrics
from paceline.trainer.diagnostics.parameter_statistics import parameter_statistics
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.duration import Clock, Pace, Progress, peak_gib


class StepLogger:
    """A log of step results, equal on every rank. `is_stop_requested` is True once any rank requests a stop."""

    def __init__(self, *, setup: TrainingSetup, loader: BatchLoader, event_bus: EventBus, progress: Progress) -> None:
        self.clock = Clock()
        self.last_result: StepResult | None = None
        self.is_stop_requested = False
        self._setup = setup
        self._update = setup.update
        self._loader = loader
        self._event_bus = event_bus
        self._progress = progress
        self._pending: deque[tuple[StepResult, Cursor]] = deque()
        self._cursor = Cursor()
        self._last_logged_step = -1
        self._tokens_since_log, self._samples_since_log = 0.0, 0
        self._pace = Pace()

    def record(self, result: StepResult, *, cursor: Cursor) -> None:
        """Add a step that ends at `cursor`, and process the results that are at least `lag` steps old."""
        if result.skipped:
            self._event_bus.emit(Note(text=result.skip_text, level="warning"))
        self._pending.append((result, cursor))
        self._add_to_clock(result)
        self._process_results(num_left=self._setup.step.lag)

    def flush(self) -> None:
        """Process all outstanding results. The caller has completed the steps in flight."""
        self._process_results(num_left=0)

    def log_last(self) -> None:
        """Log the last step, whether or not it falls on `log.every`."""
        if self.last_result is not None and self._last_logged_step != self.last_result.step:
            self._log(self.last_result)

    def report_staleness(self, *, step: int) -> None:
        """Emit the staleness that each rank measured, if updates are asynchronous. Every rank must call this."""
        local_staleness = self._setup.step.collect_staleness()
        if local_staleness is not None:
            reports = tuple(
                report for rank_reports in self._setup.world.gather_json(local_staleness) for report in rank_reports
            )
            self._event_bus.emit(Staleness(step=step, update=self._setup.plan.update, told=reports))

    def _process_results(self, *, num_left: int) -> None:
        """Check and log the oldest results, until only `num_left` results are left."""
        while len(self._pending) > num_left:
            result, self._cursor = self._pending.popleft()
            totals = result.totals
            totals.check_counts()
            self._update.refuse_empty_batch(step=result.step, loss=totals.loss, counts=totals.counts)
            if self.last_result is None:
                refuse_unknown_metrics(self._setup.job, terms=result.terms)
            self.last_result = result
            self.is_stop_requested = self.is_stop_requested or totals.stop
            self._count_tokens(result)
            if result.step % self._setup.settings.log.every == 0 or result.step == 1:
                self._log(result)

    def _add_to_clock(self, result: StepResult) -> None:
        """Add a step to the clock when it runs, because delayed results arrive several at a time."""
        clock = self.clock
        clock.steps += 1
        clock.samples += result.samples
        clock.compute_seconds += result.compute_seconds
        clock.communication_seconds += result.communication_seconds

    def _count_tokens(self, result: StepResult) -> None:
        tokens = max(result.totals.counts.values(), default=0.0)
        self._tokens_since_log += tokens
        self._samples_since_log += result.samples
        self._progress.tokens += tokens

    def _log(self, result: StepResult) -> None:
        """Emit `StepDone` with this step's results and the mean times since the last logged step."""
        self._last_logged_step = result.step
        setup, clock, cursor = self._setup, self.clock, self._cursor
        if clock.steps:
            self._pace, self.clock = clock.pace(), Clock()
        pace = self._pace
        tokens_per_sample = self._tokens_since_log / max(self._samples_since_log, 1)
        has_tokens = self._tokens_since_log != self._samples_since_log
        self._tokens_since_log, self._samples_since_log = 0.0, 0
        self._event_bus.emit(
            StepDone(
                step=result.step,
                epoch=self._epoch(cursor),
                samples=cursor.samples,
                loss=result.loss,
                terms=result.terms,
                grad_norm=result.grad_norm,
                lr=setup.update.lr if result.lr is None else result.lr,
                step_seconds=pace.step_seconds,
                data_seconds=pace.data_seconds,
                compute_seconds=pace.compute_seconds,
                communication_seconds=pace.communication_seconds,
                checkpoint_seconds=clock.save_seconds / clock.steps if clock.steps else 0.0,
                evaluation_seconds=clock.evaluation_seconds / clock.steps if clock.steps else 0.0,
                samples_per_second=pace.samples_per_second,
                tokens_per_second=tokens_per_sample * pace.samples_per_second if has_tokens else None,
                memory_peak_gib=peak_gib(setup.world.device),
                sent_bytes=setup.step.sent_bytes,
                statistics=parameter_statistics(setup) if setup.settings.log.statistics else {},
            )
        )
        self._warn(is_first_step=result.step == 1)

    def _warn(self, *, is_first_step: bool) -> None:
        """Emit the warnings that have come up since the last logged step."""
        unused_note = unused_parameters_note(self._setup.named_parameters) if is_first_step else ""
        replica = self._setup.step.replica
        loss_note = replica.contract.note if is_first_step else ""
        notes = [*filter(None, (unused_note, loss_note)), *replica.buffers.new_notes()]
        for note in [*notes, *(note for recorder in replica.state_recorders for note in recorder.new_notes())]:
            self._event_bus.emit(Note(text=note, level="warning"))

    def _epoch(self, cursor: Cursor) -> float:
        if self._loader.num_samples is None:
            return float(cursor.epoch)
        return cursor.epoch + cursor.position / self._loader.num_samples
