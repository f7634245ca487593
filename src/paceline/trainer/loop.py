"""The training loop: run steps, log them, and evaluate, save or stop when due. It is the same for every update rule."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from paceline.comm.process_group import World
from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.data.types import StepInput
from paceline.errors import ExitCode, NonFiniteError, UsageError
from paceline.events import EvalDone, EventBus, Note, Staleness
from paceline.faults import Faults
from paceline.launch.agent.shared_status import Pulse
from paceline.launch.agent.signals import StopFlag
from paceline.launch.failures.failure_record import at_step
from paceline.step.step_totals import StepResult
from paceline.step.update_rules import step_rule
from paceline.trainer.batch_guard import BatchGuard
from paceline.trainer.checkpointer import Checkpointer
from paceline.trainer.diagnostics.finite_weights import refuse_nonfinite_weights
from paceline.trainer.diagnostics.forecast_check import ForecastCheck
from paceline.trainer.diagnostics.memory_report import MemoryBaseline, naming_memory
from paceline.trainer.diagnostics.nonfinite_inputs import name_inputs
from paceline.trainer.diagnostics.replica_check import check_replicas
from paceline.trainer.evaluation.early_stopping import BestMetricTracker
from paceline.trainer.evaluation.evaluator import Evaluator, eval_batch_size
from paceline.trainer.evaluation.metrics_on_all_ranks import SharedMetrics, numbers_and_text
from paceline.trainer.random_access_reading import whole_batch
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.duration import Clock, Length, Progress, derived_interval
from paceline.trainer.step_logger import StepLogger


class Loop:
    """The training loop of one rank. Every rank takes the same decisions, because they depend only on shared values."""

    def __init__(
        self,
        *,
        built: TrainingSetup,
        feed: BatchLoader,
        saver: Checkpointer,
        event_bus: EventBus,
        pulse: Pulse | None,
        faults: Faults,
        stop: StopFlag,
        length: Length,
        cursor: Cursor,
        progress: Progress,
        before: MemoryBaseline,
        forecast_check: ForecastCheck,
        on_eval_target: Any = None,
    ) -> None:
        self.built = built
        self.cursor = cursor
        self.progress = progress
        self.event_bus = event_bus
        self.feed = feed
        self._batch_guard = BatchGuard(feed)
        self.stopping = False
        self.reason = ""
        self._is_read_out = False
        self._is_on_cpu = built.world.device.type == "cpu"
        self._saver = saver
        self._pulse = pulse
        self._faults = faults
        self._faults_before_step = [faults] if faults.has_any else []
        self._stop = stop
        self._open_lengths = [length] if length.is_open else []
        self._before = before
        self.forecast_check = forecast_check
        self._forecast_checks = [forecast_check] if forecast_check.is_on else []
        self._target = on_eval_target
        self._logger = StepLogger(built=built, feed=feed, event_bus=event_bus, progress=progress)
        batch, drop_last = built.plan.global_batch_size, built.settings.data.drop_last
        self.total_steps = length.total_steps(batch=batch, drop_last=drop_last)
        self.save_every = built.settings.checkpoint.every or derived_interval(self.total_steps)
        self.eval_every = built.settings.eval.every or derived_interval(self.total_steps)
        self._best_metric = BestMetricTracker(built.job, progress)
        self.rule_changes = self._best_metric.rule_changes
        self._is_ended_early = self._best_metric.is_over
        self._evaluator = Evaluator(built)
        self._shared = SharedMetrics(built.world)
        self._began = self._checked = cursor.step
        self._given: deque[StepInput] = deque(maxlen=kept_batches(built))

    def batches(self) -> Iterator[StepInput]:
        """Yield this replica's microbatches of each step, from the current position until the run is over or stopped.

        Raises:
            UsageError: an earlier loop over the batches has reached the end of the run.
        """
        if self._is_read_out and not self.stopping:
            raise self._no_more()
        self.built.refuse_training()
        self._stop.renew()
        self.progress.unjudged = self.progress.unjudged and self.built.job.eval_data is not None
        if self.progress.unjudged and not self.stopping:
            self._record_verdict(self._improves(self.evaluate()))
        if self.stopping or self.is_over():
            return
        batches = self._batch_guard.loop()
        self._logger.clock = Clock()
        self._beat()
        while True:
            began = time.perf_counter()
            try:
                given = next(batches)
            except BaseException:
                self._raise_explained(step=self.cursor.step + 1)
            self._logger.clock.data += time.perf_counter() - began
            yield given
            if self.stopping or self.is_over():
                self._is_read_out = not self.stopping
                return

    def _no_more(self) -> UsageError:
        return UsageError(
            f"this run has ended at {self.place}: run.batches() has no more batches.",
            cause="run.batches() is called once per epoch, but it gives the batches of all epochs",
            hint='one loop, for batch in run.batches(): ..., and pl.Run(..., settings={"train.epochs": 3})',
        )

    def step(self, given: StepInput, *, is_shown: bool = False) -> StepResult:
        """Run one optimizer step; log, save, evaluate when due. With `needs_result`, any rank can read the result."""
        number = self.cursor.step + 1
        try:
            result = self._step(given)
            if is_shown:
                self.built.step.flush_reports()
            return result
        except BaseException:
            self._raise_explained(step=number)

    def _raise_explained(self, *, step: int) -> NoReturn:
        """Re-raise the current exception with the step's number and, if memory ran out, the memory by purpose."""
        with at_step(step), naming_memory(self.built, self._before):
            raise

    def _step(self, given: StepInput) -> StepResult:
        if given is None or given is not self._batch_guard.waiting:
            self._batch_guard.check(given)
        self._stop.renew()
        for faults in self._faults_before_step:
            faults.fire("step", step=self.cursor.step + 1)
        self.built.step.steps_done = self.cursor.step
        with ExitStack() as timing:
            for check in self._forecast_checks:
                timing.enter_context(check.timing())
            result = self._run(given)
        self.cursor = given.batch.after
        self._batch_guard.waiting = None
        for note in [*given.notes, *self.built.step.new_notes()]:
            self.event_bus.emit(Note(text=note))
        self._logger.record(result, cursor=self.cursor)
        for check in self._forecast_checks:
            check.report_when_ready(step=self.cursor.step, over=self.is_over())
        self._after()
        return result

    def agree_on(self, call: str) -> None:
        """Check that all ranks are at the same call in the script. Every rank calls this.

        Raises:
            UsageError: another rank is at a different call.
        """
        calls = self.built.world.gather_json(call)
        other = next((rank for rank, each in enumerate(calls) if each != calls[0]), None)
        if other is not None:
            raise UsageError(
                f"rank 0 is at {calls[0]}, and rank {other} at {calls[other]}: every rank must make this call.",
                cause="a call inside `if run.rank == 0:`",
                hint="call it on every rank, and print its result on rank 0",
            )

    def settle(self) -> None:
        """Complete any step still in flight, so that the weights can be read."""
        with self._naming_inputs():
            self.built.step.settle()
        self._logger.flush()
        for note in self.built.step.new_notes():
            self.event_bus.emit(Note(text=note))

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """Complete any step in flight. Inside the block, local SGD's weights are the mean of the sites. Collective."""
        self.settle()
        with self.built.step.synchronised_weights():
            yield

    def _run(self, given: StepInput) -> StepResult:
        self._given.append(given)
        with self._naming_inputs():
            return self.built.step.run(given, stop=self._stop.requested)

    @contextmanager
    def _naming_inputs(self) -> Iterator[None]:
        """Add the non-finite inputs to a `NonFiniteError`, which may belong to an earlier step.

        If results are read with a delay, ranks raise the error at different times, so each checks only its own inputs.
        """
        try:
            yield
        except NonFiniteError as error:
            world = World.alone() if self.built.step.results_differ else self.built.world
            given = next((one for one in self._given if one.batch.after.step == error.step), self._given[-1])
            if not step_rule(self.built.plan.rule).traits.reads_samples:
                given = whole_batch(given, self.built)
            over_batch = self.built.step.replica.contract.over_batch
            raise name_inputs(error, given, world=world, over_batch=over_batch) from None

    def evaluate(self, *, split: str = "eval", data: Any = None) -> EvalDone:
        """Return exact metrics on a split, with the current weights or with their average if the job has one."""
        event = self._evaluate(split=split, data=data)
        assert event is not None
        return event

    def _evaluate(
        self, *, split: str = "eval", data: Any = None, stop: Callable[[], bool] = lambda: False
    ) -> EvalDone | None:
        self.settle()
        began = time.perf_counter()
        data = data if data is not None else getattr(self.built.job, f"{split}_data")
        with self.built.as_evaluated(), self.built.step.synchronised_weights():
            size = eval_batch_size(self.built)
            found = self._evaluator.run(data, batch_size=size, name=f"{split}_data", beat=self._beat, stop=stop)
            if found is None:
                return None
            self._beat(phase="on_eval")
            extra, text = numbers_and_text(self.built.job.on_eval(self._target) if self.built.job.on_eval else None)
        if self.built.job.on_eval:
            self.built.step.settle()  # with Hogwild no worker continues while another still reads the weights
        metrics = self._shared.share({**found.metrics, **extra})
        for note in filter(None, (self._shared.note, self._evaluator.note)):
            self.event_bus.emit(Note(text=note, level="warning"))
        event = EvalDone(
            step=self.cursor.step,
            split=split,
            metrics=metrics,
            samples=found.samples,
            seconds=time.perf_counter() - began,
            average=self.built.update.ema is not None,
            extra=text,
        )
        self._logger.clock.evaluating += time.perf_counter() - began
        self.event_bus.emit(event)
        return event

    def save(self, *, best: bool = False) -> None:
        """Save a checkpoint now. Every rank must call this."""
        self.settle()
        self._beat(phase="save")
        began = time.perf_counter()
        self.built.step.late.check(None)
        self._check()
        refuse_nonfinite_weights(self.built, step=self.cursor.step)
        self._tell_late()
        self._faults.fire("save", step=self.cursor.step)
        for event in self._saver.save(cursor=self.cursor, feed=self.feed, extra=self.progress.as_json(), best=best):
            self.event_bus.emit(event)
        self._logger.clock.saving += time.perf_counter() - began

    def _tell_late(self) -> None:
        """Emit the staleness that each rank measured, if updates are asynchronous."""
        mine = self.built.step.lateness()
        if mine is not None:
            told = tuple(one for found in self.built.world.gather_json(mine) for one in found)
            self.event_bus.emit(Staleness(step=self.cursor.step, update=self.built.plan.update, told=told))

    @property
    def place(self) -> str:
        """The current position as text, such as "step 3 of 10"."""
        return f"step {self.cursor.step}{f' of {self.total_steps}' if self.total_steps else ''}"

    def finish(self) -> ExitCode:
        """Save the last step if it is not saved yet, and return the exit code."""
        if any(self.built.world.gather_json(self._stop.requested)):  # a signal may also come between two steps
            self.reason = "signal"
        if self._saver.last_saved != self.cursor.step:
            self.save()
        over = self.is_over() and not self.progress.unjudged
        return ExitCode.DONE if over else ExitCode.STOPPED

    def request_stop(self) -> None:
        """Stop after this step. Every rank must call this."""
        self.stopping, self.reason = True, self.reason or "asked"

    def _after(self) -> None:
        step = self.cursor.step
        if self.is_over():
            self.settle()
            self._logger.log_last()
        if self._logger.stops:
            self.stopping, self.reason = True, "signal"
        every = self.built.settings.train.check_every
        if step == self._began + 1 or (every and step % every == 0):
            self._check()
        if step == self._began + 1:
            self.settle()
            self._saver.check()
        over = self.is_over()
        due = self.built.job.eval_data is not None and (step % self.eval_every == 0 or over)
        if step % self.save_every == 0 or over or self.stopping:
            self.progress.unjudged = due  # save before a due evaluation, because the evaluation may fail
            self.save()
        if due:
            self._evaluate_due()
        self._beat()

    def _check(self) -> None:
        """Compare the replicas, unless this step was already checked or `train.check_every` is 0."""
        if self.built.settings.train.check_every and self._checked != self.cursor.step:
            self.settle()
            check_replicas(self.built, step=self.cursor.step)
            self._checked = self.cursor.step

    def _evaluate_due(self) -> None:
        """Evaluate, unless a stop is requested before or during the evaluation; the resumed run then starts with it."""
        self._faults.fire("eval", step=self.cursor.step)
        event = None if self.stopping else self._evaluate(stop=lambda: self._stop.requested)
        if event is None:
            self.progress.unjudged = True
            self.stopping, self.reason = True, self.reason or "signal"
        best = event is not None and self._improves(event)
        if event is not None or self._saver.last_saved != self.cursor.step:
            self._record_verdict(best)

    def _record_verdict(self, best: bool) -> None:
        """Write an evaluation's outcome to disk: amend this step's checkpoint, or save one for a best or last step."""
        if self._saver.last_saved == self.cursor.step:
            self._saver.amend(extra=self.progress.as_json(), best=best)
            if best:
                self.event_bus.emit(Note(text=f"step {self.cursor.step} is the best so far"))
        elif best or self.stopping:
            self.save(best=best)

    def _improves(self, event: EvalDone) -> bool:
        verdict = self._best_metric.hear(event)
        self._is_ended_early = self._best_metric.is_over
        for note in verdict.notes:
            self.event_bus.emit(note)
        if verdict.ends:
            self.stopping, self.reason = True, "early"
        return verdict.best

    def is_over(self) -> bool:
        """Return True once the run has reached its length or early stopping has ended it."""
        if self._is_ended_early or (self.total_steps is not None and self.cursor.step >= self.total_steps):
            return True
        return any(length.reached(self.cursor, tokens=self.progress.tokens) for length in self._open_lengths)

    def beat_over(self) -> None:
        """Report over the heartbeat that no more steps follow, so that the script may take as long as it needs."""
        self._beat(phase="over")

    def _beat(self, *, phase: str = "step") -> None:
        if self._pulse is not None:
            last = self._logger.last
            loss = last.loss if last is not None and self._is_on_cpu else 0.0
            self._pulse.beat(step=self.cursor.step, total=self.total_steps or 0, loss=loss, phase=phase)


def kept_batches(built: TrainingSetup) -> int:
    """Return the number of recent steps whose inputs the loop keeps, to name them when a later check fails."""
    return built.step.kept_batches
