"""The training loop: run steps, log them, and evaluate, save or stop when due. It is the same for every update rule."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from paceline.comm.process_group import World
from paceline.data.loader import BatchLoader
from paceline.data.order.cursor import Cursor
from paceline.data.types import StepInput
from paceline.errors import ExitCode, NonFiniteError, SpikeError, UsageError
from paceline.events import EvalDone, EventBus, Note
from paceline.faults import Faults, missed_faults_error
from paceline.launch.agent.shared_status import FINISHED_PHASE, HeartbeatWriter
from paceline.launch.agent.signals import StopFlag
from paceline.launch.failures.failure_record import annotate_step
from paceline.step.step_totals import StepResult
from paceline.step.update_rules import step_rule
from paceline.trainer.diagnostics.finite_weights import refuse_nonfinite_weights
from paceline.trainer.diagnostics.forecast_check import ForecastCheck
from paceline.trainer.diagnostics.memory_report import MemoryBaseline, explain_out_of_memory
from paceline.trainer.diagnostics.nonfinite_inputs import explain_nonfinite_inputs
from paceline.trainer.diagnostics.replica_check import ReplicaChecks
from paceline.trainer.evaluation.early_stopping import BestMetricTracker
from paceline.trainer.evaluation.evaluator import Evaluator, eval_batch_size
from paceline.trainer.evaluation.on_eval_results import SharedMetrics, split_numbers_and_text
from paceline.trainer.fault_injection import inject_step_fault
from paceline.trainer.one_step_per_batch import BatchGuard
from paceline.trainer.random_access_reading import read_full_batch
from paceline.trainer.saving.checkpointer import Checkpointer
from paceline.trainer.saving.memory.memory_tier import MemoryTier
from paceline.trainer.saving.rollback import SKIPPED, Rollback
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.trainer.setup.duration import Clock, Length, Progress, derived_interval
from paceline.trainer.step_logger import StepLogger


class Loop:
    """The training loop of one rank.

    Every rank makes the same decisions, because decisions depend only on values that all ranks share. The
    job's function `on_eval` is called with `on_eval_argument`.
    """

    def __init__(
        self,
        *,
        setup: TrainingSetup,
        loader: BatchLoader,
        checkpointer: Checkpointer,
        memory_tier: MemoryTier | None = None,
        event_bus: EventBus,
        heartbeat: HeartbeatWriter | None,
        faults: Faults,
        stop: StopFlag,
        length: Length,
        cursor: Cursor,
        progress: Progress,
        memory_baseline: MemoryBaseline,
        forecast_check: ForecastCheck,
        on_eval_argument: Any = None,
        replica_checks: ReplicaChecks,
        rollback: Rollback,
    ) -> None:
        self.setup = setup
        self.cursor = cursor
        self.progress = progress
        self.event_bus = event_bus
        self.loader = loader
        self._batch_guard = BatchGuard(loader)
        self.is_stopping, self.stop_reason = False, ""
        self._is_exhausted = False
        self._is_on_cpu = setup.world.device.type == "cpu"
        self._checkpointer = checkpointer
        self._heartbeat = heartbeat
        self._faults = faults
        # A step loops over this list, `_open_lengths` and `_forecast_checks`. A list is empty if its feature is off.
        self._faults_before_step = [faults] if faults.has_any else []
        self._stop = stop
        self._open_lengths = [length] if length.is_open else []
        self._memory_baseline = memory_baseline
        self.forecast_check = forecast_check
        self._memory_tier = memory_tier
        self._next_memory_step = math.inf if memory_tier is None else memory_tier.next_step
        self._forecast_checks = [forecast_check] if forecast_check.is_on else []
        self._background_checkpointers = [checkpointer] if checkpointer.uses_background else []
        self._on_eval_argument = on_eval_argument
        self._replica_checks = replica_checks
        self._next_check_step = replica_checks.next_step(cursor.step)
        self._rollback = rollback
        self._logger = StepLogger(setup=setup, loader=loader, event_bus=event_bus, progress=progress)
        batch, drop_last = setup.plan.global_batch_size, setup.settings.data.drop_last
        self.total_steps = length.total_steps(batch=batch, drop_last=drop_last)
        self.save_every = setup.settings.checkpoint.every or derived_interval(self.total_steps)
        self.eval_every = setup.settings.eval.every or derived_interval(self.total_steps)
        self._best_metric = BestMetricTracker(setup.job, progress)
        self.rule_changes = self._best_metric.rule_changes  # lines for the banner
        self._is_ended_early = self._best_metric.is_over
        self._evaluator = Evaluator(setup)
        self._shared_metrics = SharedMetrics(setup.world)
        self._start_step = cursor.step
        self._recent_inputs: deque[StepInput] = deque(maxlen=setup.step.num_retained_batches)

    def batches(self) -> Iterator[StepInput]:
        """Yield this replica's microbatches of each step, from the current position until the run is over or stopped.

        Raises:
            UsageError: an earlier loop over the batches has reached the end of the run.
        """
        if self._is_exhausted and not self.is_stopping:
            raise self._no_more_batches()
        self.setup.check_trainable()
        self._stop.reinstall()
        self.progress.is_evaluation_pending = (
            self.progress.is_evaluation_pending and self.setup.job.eval_data is not None
        )
        if self.progress.is_evaluation_pending and not self.is_stopping:
            self._record_outcome(self._judge_evaluation(self.evaluate()))
        if self.is_stopping or self.is_over():
            return
        batches = self._batch_guard.iterate()
        self._logger.clock = Clock()
        self._send_heartbeat()
        while True:
            start_time = time.perf_counter()
            try:
                step_batch = next(batches)
            except BaseException:
                self._raise_with_context(step=self.cursor.step + 1)
            self._logger.clock.data_seconds += time.perf_counter() - start_time
            if step_batch.batch.next_cursor.step in self._rollback.left_out:
                self._leave_out(step_batch)
            else:
                yield step_batch
            if self.is_stopping or self.is_over():
                self._is_exhausted = not self.is_stopping
                return

    def _leave_out(self, step_batch: StepInput) -> None:
        """Leave out the step on a batch after which the run was rolled back. It counts as a step without an update."""
        self.cursor = step_batch.batch.next_cursor
        self._batch_guard.pending_batch = None
        self.setup.update.step_lr_schedulers()
        self.event_bus.emit(Note(text=f"step {self.cursor.step} is left out, as {SKIPPED} says", level="warning"))
        with annotate_step(self.cursor.step):
            self._run_due_actions()

    def _no_more_batches(self) -> UsageError:
        return UsageError(
            f"this run has ended at {self.position_text}: run.batches() has no more batches.",
            cause="run.batches() is called once per epoch, but it gives the batches of all epochs",
            hint='one loop, for batch in run.batches(): ..., and pl.Run(..., settings={"train.epochs": 3})',
        )

    def step(self, step_batch: StepInput, *, needs_result: bool = False) -> StepResult:
        """Run one optimizer step, then log, save and evaluate if they are due.

        With `needs_result`, a single rank can read the result, even if the other ranks do not.
        """
        step_number = self.cursor.step + 1
        try:
            result = self._train_step(step_batch)
            if needs_result:
                self.setup.step.flush_reports()
            return result
        except BaseException:
            self._raise_with_context(step=step_number)

    def _raise_with_context(self, *, step: int) -> NoReturn:
        """Re-raise the current exception with the step's number and, if memory ran out, the memory by purpose."""
        with annotate_step(step), explain_out_of_memory(self.setup, self._memory_baseline):
            raise

    def _train_step(self, step_batch: StepInput) -> StepResult:
        """Run one step, log it, and run what is due after it."""
        if step_batch is None or step_batch is not self._batch_guard.pending_batch:
            self._batch_guard.check(step_batch)
        self._stop.reinstall()
        for faults in self._faults_before_step:
            inject_step_fault(faults, step=self.cursor.step + 1, setup=self.setup, memory=self._checkpointer.memory)
        self.setup.step.steps_done = self.cursor.step
        with ExitStack() as timing:
            for check in self._forecast_checks:
                timing.enter_context(check.timing())
            result = self._run_step(step_batch)
        self.cursor = step_batch.batch.next_cursor
        self._batch_guard.pending_batch = None
        for note in [*step_batch.notes, *self.setup.step.new_notes()]:
            self.event_bus.emit(Note(text=note))
        self._logger.record(result, cursor=self.cursor)
        for check in self._forecast_checks:
            check.report_when_ready(step=self.cursor.step, is_last_step=self.is_over())
        self._run_due_actions()
        return result

    def check_same_call(self, local_call: str) -> None:
        """Check that all ranks are at the same call in the script, which `local_call` names. Every rank calls this.

        Raises:
            UsageError: another rank is at a different call.
        """
        calls = self.setup.world.gather_json(local_call)
        other = next((rank for rank, other_call in enumerate(calls) if other_call != calls[0]), None)
        if other is not None:
            raise UsageError(
                f"rank 0 is at {calls[0]}, and rank {other} at {calls[other]}: every rank must make the same calls.",
                cause="a call inside `if run.rank == 0:`",
                hint="call it on every rank, and print its result on rank 0",
            )

    def finish_pending(self) -> None:
        """Complete the steps in flight, so that the weights can be read."""
        with self._explain_nonfinite():
            self.setup.step.finish_pending()
        self._logger.flush()
        for note in self.setup.step.new_notes():
            self.event_bus.emit(Note(text=note))

    @contextmanager
    def synchronized_weights(self) -> Iterator[None]:
        """Return a context in which the model has the weights to read: under local SGD, the sites' mean weights.

        Every rank must call this.
        """
        self.finish_pending()
        with self.setup.step.synchronized_weights():
            yield

    def _run_step(self, step_batch: StepInput) -> StepResult:
        self._recent_inputs.append(step_batch)
        with self._explain_nonfinite():
            return self.setup.step.run(step_batch, stop=self._stop.is_requested)

    @contextmanager
    def _explain_nonfinite(self) -> Iterator[None]:
        """Return a context that adds the non-finite microbatches and samples of the step to a `NonFiniteError`.

        The error may belong to an earlier step. If results are read with a delay, ranks raise the error at different
        times, so each rank checks only its own inputs.
        """
        try:
            yield
        except SpikeError as error:
            raise self._rollback.begin(error, self._recent_inputs[-1]) from None
        except NonFiniteError as error:
            world = World.alone() if self.setup.step.has_delayed_results else self.setup.world
            step_batch = next(
                (recent for recent in self._recent_inputs if recent.batch.next_cursor.step == error.step),
                self._recent_inputs[-1],
            )
            if not step_rule(self.setup.plan.update_rule).traits.reads_samples:
                step_batch = read_full_batch(step_batch, self.setup)
            over_batch = self.setup.step.replica.contract.over_batch
            explained = explain_nonfinite_inputs(error, step_batch, world=world, over_batch=over_batch)
            raise self._rollback.begin(explained, step_batch) from None

    def evaluate(self, *, split: str = "eval") -> EvalDone:
        """Return exact metrics on a split, with the current weights or with their average if the job has one."""
        event = self._evaluate(split=split)
        assert event is not None
        return event

    def _evaluate(self, *, split: str = "eval", stop: Callable[[], bool] = lambda: False) -> EvalDone | None:
        """Return the metrics, or None if `stop()` returned True on any rank during the evaluation."""
        self.finish_pending()
        self._send_heartbeat()  # a save may have come before
        start_time = time.perf_counter()
        data = getattr(self.setup.job, f"{split}_data")
        with self.setup.as_evaluated(), self.setup.step.synchronized_weights():
            size = eval_batch_size(self.setup)
            result = self._evaluator.run(
                data, batch_size=size, name=f"{split}_data", send_heartbeat=self._send_heartbeat, stop=stop
            )
            if result is None:
                return None
            self._send_heartbeat(phase="on_eval")
            on_eval_numbers, on_eval_text = split_numbers_and_text(
                self.setup.job.on_eval(self._on_eval_argument) if self.setup.job.on_eval else None
            )
        if self.setup.job.on_eval:
            self.setup.step.finish_pending()  # under Hogwild, no worker may train while another reads the weights
        metrics = self._shared_metrics.share({**result.metrics, **on_eval_numbers})
        for note in filter(None, (self._shared_metrics.note, self._evaluator.note)):
            self.event_bus.emit(Note(text=note, level="warning"))
        event = EvalDone(
            step=self.cursor.step,
            split=split,
            metrics=metrics,
            samples=result.samples,
            seconds=time.perf_counter() - start_time,
            average=self.setup.update.ema is not None,
            extra=on_eval_text,
        )
        self._logger.clock.evaluation_seconds += time.perf_counter() - start_time
        self.event_bus.emit(event)
        return event

    def save(self, *, is_best: bool = False, in_background: bool = False) -> None:
        """Save a checkpoint now; with `in_background`, it may be on disk only later. Every rank must call this."""
        self.finish_pending()
        self._send_heartbeat(phase="save")
        start_time = time.perf_counter()
        self.setup.step.deferred_finite_check.check_last_step()
        self._check_replicas()
        refuse_nonfinite_weights(self.setup, step=self.cursor.step)
        self._logger.report_staleness(step=self.cursor.step)
        self._faults.fire("save", step=self.cursor.step)
        self.event_bus.emit_all(self._checkpointer.complete())
        tolerating = self._checkpointer.tolerating_failure(is_final=not in_background)
        with tolerating as events, self._faults.full_disk(step=self.cursor.step):
            events += self._checkpointer.save(**self._saved_state, is_best=is_best, in_background=in_background)
        self.event_bus.emit_all(events)
        self._logger.clock.save_seconds += time.perf_counter() - start_time

    @property
    def _saved_state(self) -> dict[str, Any]:
        """The part of the loop's state that checkpoints hold, as arguments."""
        return {"cursor": self.cursor, "loader": self.loader, "progress": self.progress.as_json()}

    @property
    def position_text(self) -> str:
        """The current position as text, such as "step 3 of 10"."""
        return f"step {self.cursor.step}{f' of {self.total_steps}' if self.total_steps else ''}"

    def finish(self) -> ExitCode:
        """Save the last step if it is not saved yet, and return the exit code."""
        self._send_heartbeat(phase="save")
        self.event_bus.emit_all(self._checkpointer.complete())
        if any(self.setup.world.gather_json(self._stop.is_requested)):  # a signal may also come between two steps
            self.stop_reason = "signal"
        if self._checkpointer.last_saved != self.cursor.step:
            self.save()
        is_complete = self.is_over() and not self.progress.is_evaluation_pending
        return ExitCode.DONE if is_complete else ExitCode.STOPPED

    def refuse_missed_faults(self) -> None:
        """Check at the end of a run that every fault of `--faults` has happened. Every rank must call this.

        Raises:
            RunError: a fault has not happened.
        """
        missed = [fault for rank in self.setup.world.gather_json(self._faults.missed) for fault in rank]
        if missed:
            raise missed_faults_error(missed)

    def request_stop(self) -> None:
        """Stop after this step. Every rank must call this."""
        self.is_stopping, self.stop_reason = True, self.stop_reason or "asked"

    def _run_due_actions(self) -> None:
        """Check, save, evaluate and stop after a step, if they are due."""
        step = self.cursor.step
        if self.is_over():
            self.finish_pending()
            self._logger.log_last()
        if self._logger.is_stop_requested:
            self.is_stopping, self.stop_reason = True, "signal"
        if step >= self._next_check_step:
            self.finish_pending()
            self._check_replicas()
            self._next_check_step = self._replica_checks.next_step(step)
        if step == self._start_step + 1:
            self.finish_pending()
            self.event_bus.emit_all(self._checkpointer.check_savable(**self._saved_state))
        is_last_step = self.is_over()
        is_evaluation_due = self.setup.job.eval_data is not None and (step % self.eval_every == 0 or is_last_step)
        is_save_due = step % self.save_every == 0 or self._checkpointer.needs_trial
        if is_save_due or is_last_step or self.is_stopping:
            # save before a due evaluation, because the evaluation may fail
            self.progress.is_evaluation_pending = is_evaluation_due
            self.save(in_background=not (is_last_step or self.is_stopping))
        for checkpointer in self._background_checkpointers:
            self.event_bus.emit_all(checkpointer.take_events())
        if is_evaluation_due:
            self._evaluate_due()
        if step >= self._next_memory_step and self._memory_tier is not None:
            if self._checkpointer.last_started == step:
                self._memory_tier.postpone(step)
            else:
                self._save_to_memory(self._memory_tier)
            self._next_memory_step = self._memory_tier.next_step
        self._send_heartbeat()

    def _save_to_memory(self, tier: MemoryTier) -> None:
        self.finish_pending()
        start_time = time.perf_counter()
        self.setup.step.deferred_finite_check.check_last_step()
        self._check_replicas()  # a restart must not continue from a wrong copy
        refuse_nonfinite_weights(self.setup, step=self.cursor.step)
        self.event_bus.emit_all(tier.save(**self._saved_state))
        self._logger.clock.save_seconds += time.perf_counter() - start_time

    def _check_replicas(self) -> None:
        self.event_bus.emit_all(self._replica_checks.check(self.cursor.step))

    def _evaluate_due(self) -> None:
        """Evaluate. If a stop is requested before the evaluation ends, the resumed run will repeat it first."""
        self._faults.fire("eval", step=self.cursor.step)
        event = None if self.is_stopping else self._evaluate(stop=lambda: self._stop.is_requested)
        if event is None:
            self.progress.is_evaluation_pending = True
            self.is_stopping, self.stop_reason = True, self.stop_reason or "signal"
        is_best = event is not None and self._judge_evaluation(event)
        if event is not None or self._checkpointer.last_started != self.cursor.step:
            self._record_outcome(is_best)

    def _record_outcome(self, is_best: bool) -> None:
        """Write an evaluation's outcome into this step's checkpoint.

        If the step has no checkpoint, save one if the step is the best so far or the run is stopping.
        """
        if self._checkpointer.last_started == self.cursor.step:
            self.event_bus.emit_all(self._checkpointer.amend(progress=self.progress.as_json(), is_best=is_best))
            if is_best:
                self.event_bus.emit(Note(text=f"step {self.cursor.step} is the best so far"))
        elif is_best or self.is_stopping:
            self.save(is_best=is_best, in_background=not self.is_stopping)

    def _judge_evaluation(self, event: EvalDone) -> bool:
        """Return whether the evaluation is the best so far. Stop the run if early stopping demands it."""
        outcome = self._best_metric.record_evaluation(event)
        self._is_ended_early = self._best_metric.is_over
        for note in outcome.notes:
            self.event_bus.emit(note)
        if outcome.ends_run:
            self.is_stopping, self.stop_reason = True, "early"
        return outcome.is_best

    def is_over(self) -> bool:
        """Return True once the run has reached its length or early stopping has ended it."""
        if self._is_ended_early or (self.total_steps is not None and self.cursor.step >= self.total_steps):
            return True
        return any(length.is_reached(self.cursor, tokens=self.progress.tokens) for length in self._open_lengths)

    def report_finished(self) -> None:
        """Report in the heartbeat that no more steps follow. From then on, the launcher accepts a long silence."""
        self._send_heartbeat(phase=FINISHED_PHASE)
        self._checkpointer.close()

    def _send_heartbeat(self, *, phase: str = "step") -> None:
        if self._heartbeat is not None:
            last_result = self._logger.last_result
            loss = last_result.loss if last_result is not None and self._is_on_cpu else 0.0
            self._heartbeat.write(step=self.cursor.step, total=self.total_steps or 0, loss=loss, phase=phase)
