"""The step of a pipeline that is never flushed: each stage updates its weights while later batches are in flight.

A step starts one batch and finishes an earlier batch. How much earlier that batch is depends on the stage. So all ranks
read the reduced values `lag` steps late, without waiting. `finish_pending` drains the pipeline. Draining changes no
result, because `schedule/weight_version_rules.py` fixes which weight version each microbatch uses.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from paceline.errors import JobError
from paceline.parallel.pipeline.chain.stages import StageOutput
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.schedule.lowering import add_messages
from paceline.schedule.program import Action, Op
from paceline.schedule.weight_version_rules import BatchBoundaries, StageProgress, VersionRule, build_continuous_program
from paceline.step.forward_backward import StandInMicrobatches, loss_for_backward, open_all
from paceline.step.microbatches import StepBatch
from paceline.step.pipedream.in_flight_batches import Counts, InFlightBatch, InFlightMicrobatch, sum_over_replicas
from paceline.step.pipedream.weight_versions import Weights, WeightVersions
from paceline.step.pipeline.pipeline_forward_backward import PipelineForwardBackward
from paceline.step.pipeline.schedule_interpreter import Pipeline
from paceline.step.replica_context import ReplicaContext
from paceline.step.step_totals import StepResult, global_counts, local_counts
from paceline.step.synchronous import SynchronousStep, parameter_write_error
from paceline.torch_internals.private_api import divide_all, run_backward


class PipeDreamStep(SynchronousStep):
    """A PipeDream step on one rank's stage. A batch has `num_microbatches` microbatches on each replica."""

    def __init__(
        self,
        replica: ReplicaContext,
        *,
        pipeline_model: PipelineModel,
        version_rule: VersionRule,
        num_microbatches: int,
    ) -> None:
        super().__init__(replica, forward_backward=PipelineForwardBackward(replica, pipeline_model=pipeline_model))
        self.lag = -(-(version_rule.stages - 1) // num_microbatches)
        self._stage = pipeline_model.world.rank
        self._version_rule = version_rule
        self._batch_boundaries = BatchBoundaries()
        self._stage_progress = StageProgress(
            version_rule=version_rule, stage=self._stage, batches=self._batch_boundaries
        )
        self._pipeline = Pipeline(
            build_continuous_program(version_rule, sizes=[1]), world=pipeline_model.world, is_continuous=True
        )
        self._work = _PipeDreamWork(replica, pipeline_model=pipeline_model, reports_loss=pipeline_model.has_loss)
        self._stand_ins = StandInMicrobatches(replica, is_always_needed=True)
        self._parameters = replica.update.parameters
        self._batches: dict[int, InFlightBatch] = {}
        self._versions_in_use: dict[int, tuple[int, Weights | None]] = {}  # (number, weights) by microbatch
        self._staleness_counts: dict[int, int] = {}
        self._max_versions = 1
        self._is_drained, self._num_steps_since_drain = True, 0
        self._num_forwards = 0
        self._starts_batch = True  # the next backward is the first of its batch
        direct = version_rule.needs_no_stash(self._stage)
        self.versions = WeightVersions(
            replica.model, named_parameters=replica.update.named_parameters, is_direct=direct
        )

    @override
    def run(self, step_batch: StepBatch, *, stop: bool = False) -> StepResult:
        """Start this batch: run the stage's next forwards and backwards, and the updates that become due."""
        start_time = time.perf_counter()
        if not self.replica.model.training:
            self.replica.model.train()
        if self._is_drained:
            # Other code, such as an evaluation, may have written to buffers since the last step. The current values are
            # the new baseline, so that these writes are not attributed to a forward of this step.
            self.replica.buffers.accept_current_values()
            self._is_drained, self._num_steps_since_drain = False, 0
        elif self._num_steps_since_drain == 2:
            self.replica.buffers.stop_comparing_values()
        self._num_steps_since_drain += 1
        batch = self._add_batch(step_batch)
        actions = self._with_messages(self._stage_progress.batch_actions())
        waited_seconds = 0.0
        if not self._work.totals_builder.has_names:
            num_run = 1 + next(n for n, action in enumerate(actions) if action.op in self._handover_ops)
            waited_seconds += self._run_actions(actions[:num_run])
            self._work.totals_builder.agree_on_names(next(iter(batch.terms.values()), None))
            actions = actions[num_run:]
        result = self._work.start_batch(batch, stop=stop)
        waited_seconds += self._run_actions(actions)
        self.steps_done += 1
        result.compute_seconds, result.communication_seconds = (
            time.perf_counter() - start_time - waited_seconds,
            waited_seconds,
        )
        return result

    def batch_ends(self) -> dict[str, list[int]]:
        """Return the state for a checkpoint: the numbers of the microbatches at which recent batches end.

        The numbers are relative to the next microbatch.
        """
        return {"ends": [end - self._batch_boundaries.num_microbatches for end in self._batch_boundaries.ends]}

    def resume(self, step: int, *, ends: Sequence[int], older_weights: Mapping[int, Weights]) -> None:
        """Resume after `step` updates, with the `ends` that `batch_ends` returned.

        `older_weights` has the older weight versions by their age in updates.
        """
        ends = list(ends) or [0] * bool(step)
        self._batch_boundaries = BatchBoundaries(ends=ends, num_dropped=step - len(ends))
        self._stage_progress = StageProgress(
            version_rule=self._version_rule, stage=self._stage, batches=self._batch_boundaries
        )
        self._num_forwards = 0
        self.versions.resume(newest=step, older_weights={step - age: weights for age, weights in older_weights.items()})

    @override
    def collect_staleness(self) -> list[dict[str, Any]]:
        """Return the gradient staleness of this stage; each microbatch counts once."""
        replica = f", replica {self.replica.worlds.data.rank}" if self.replica.worlds.data.world_size > 1 else ""
        return [
            {
                "who": f"stage {self._stage}{replica}",
                "late": [list(pair) for pair in sorted(self._staleness_counts.items())],
                "versions": self._max_versions,
                "sent_bytes": self._pipeline.sent_bytes,
            }
        ]

    @override
    def finish_pending(self) -> None:
        """Finish all batches in flight."""
        self._run_actions(self._with_messages(self._stage_progress.remaining_backwards()))
        self._pipeline.pause()
        self._is_drained = True

    @property
    def _checks_writes(self) -> bool:
        """True in the first two steps after each drain, in which forwards are checked for writes to parameters."""
        return self._num_steps_since_drain <= 2

    @property
    def _handover_ops(self) -> tuple[Op, ...]:
        """The last operations that a stage runs for a microbatch before later stages can process it."""
        return (Op.FORWARD,) if self._work.reports_loss else (Op.SEND_F,)

    def _add_batch(self, step_batch: StepBatch) -> InFlightBatch:
        """Add a batch to those in flight, with stand-ins for the microbatches that this replica lacks."""
        local_microbatches = [self.replica.load_microbatch(microbatch.data) for microbatch in step_batch.micro]
        counts = self._work.counts([local.data for local in local_microbatches])
        indices_and_sizes = [(microbatch.index, microbatch.num_samples) for microbatch in step_batch.micro]
        num_missing = self._stand_ins.count_missing(step_batch)
        if num_missing:
            local_microbatches += [self._stand_ins.load_stand_in(step_batch, local_microbatches)] * num_missing
            indices_and_sizes += [(step_batch.num_micro, 0)] * num_missing
        batch = InFlightBatch(
            number=self.steps_done, step_batch=step_batch, counts=counts, num_left=len(local_microbatches)
        )
        self._batches[self._batch_boundaries.num_batches] = batch
        for offset, ((index, samples), local) in enumerate(zip(indices_and_sizes, local_microbatches, strict=True)):
            self._work.waiting_microbatches[self._batch_boundaries.num_microbatches + offset] = InFlightMicrobatch(
                batch=batch, index=index, num_samples=samples, local_microbatch=local
            )
        self._batch_boundaries.add(batch.num_left)
        return batch

    def _with_messages(self, order: Iterable[Action]) -> list[Action]:
        """Return the stage's compute actions in this order, with the sends and receives that they need."""
        return list(add_messages(order, rank_of_stage=range(self._version_rule.stages)))

    def _run_actions(self, actions: Sequence[Action]) -> float:
        """Run the actions; return the seconds spent waiting for other ranks."""
        waited_seconds = 0.0
        self._pipeline.expect_actions(actions)
        for action in actions:
            start_time = time.perf_counter()
            if action.op is Op.FORWARD:
                self._forward(action)
            elif action.op is Op.BACKWARD:
                self._backward(action)
            elif action.op is Op.UPDATE:
                self._update(action)
            else:
                self._pipeline.run_action(action, self._work)
            if action.op.is_receive:
                waited_seconds += time.perf_counter() - start_time
        return waited_seconds

    def _forward(self, action: Action) -> None:
        """Run a microbatch's forward on the weight version that the version rule assigns to it."""
        version = self._version_rule.version(
            stage=self._stage, microbatch=action.microbatch, batches=self._batch_boundaries
        )
        version = self.versions.available_version(version)
        weights = self.versions.get(version)
        self._versions_in_use[action.microbatch] = version, weights
        writes_before = self.versions.version_counters(weights) if self._checks_writes else []
        self.versions.run_with(weights, lambda: self._pipeline.run_action(action, self._work))
        if self._checks_writes and writes_before != (writes_after := self.versions.version_counters(weights)):
            names = zip(self.versions.names, writes_before, writes_after, strict=True)
            raise parameter_write_error(next(name for name, old, new in names if old != new))
        self._num_forwards += 1

    def _backward(self, action: Action) -> None:
        """Run a microbatch's backward with the weights of its forward. Recomputed blocks use these weights too."""
        if self._starts_batch:
            for parameter in self._parameters:
                parameter.grad = None
            self._starts_batch = False
        version, weights = self._versions_in_use.pop(action.microbatch)
        staleness = self._batch_boundaries.batch_of(action.microbatch) - version
        self._staleness_counts[staleness] = self._staleness_counts.get(staleness, 0) + 1
        self.versions.prepare_backward(weights)
        self.versions.run_with(weights, lambda: self._pipeline.run_action(action, self._work))
        self.versions.collect_gradients(weights)

    def _update(self, action: Action) -> None:
        """Update with the batch's gradients, summed over this stage's replicas and divided by the global count."""
        batch = self._batches.pop(self._batch_boundaries.batch_of(action.microbatch))
        assert batch.reduction is not None and batch.result is not None
        totals = batch.reduction.wait_for_totals()
        if totals.buffers_changed:
            raise self._buffer_write_error()
        sum_over_replicas(self._parameters, world=self.replica.worlds.data)
        if batch.counts is None:
            divide_all([p.grad for p in self._parameters if p.grad is not None], batch.reduction.divisor())
        needed = self._version_rule.version(
            stage=self._stage, microbatch=self._num_forwards, batches=self._batch_boundaries
        )
        self.versions.before_update(needed=needed)
        self.replica.update.commit(
            step=batch.number + 1, loss=totals.loss, counts=totals.counts, nonfinite_terms=totals.nonfinite_terms
        )
        batch.result.lr = self.replica.update.lr
        self.versions.after_update(needed=needed)
        self._max_versions = max(
            self._max_versions, len(self.versions.numbers | {number for number, _ in self._versions_in_use.values()})
        )
        self._starts_batch = True
        self._batch_boundaries.drop_old_batches(num_kept=2 * self._version_rule.stages + 2)

    def _buffer_write_error(self) -> JobError:
        names = self.replica.buffers.changed_names()
        return JobError(
            f"the forward writes to {f'the buffer {names[0]}' if names else 'a buffer'}, whose value depends on the "
            "order of the microbatches, and a pipeline without flush has no fixed order.",
            cause="a counter or a statistic that is kept from forward to forward",
            hint="--update sync",
        )


class _PipeDreamWork:
    """The `StageWork` of this rank's stage. The last stage reports a batch's loss terms once all are known."""

    def __init__(self, replica: ReplicaContext, *, pipeline_model: PipelineModel, reports_loss: bool) -> None:
        self._replica = replica
        self._pipeline_model = pipeline_model
        self._names: list[str] | None = None
        self.reports_loss = reports_loss
        self.totals_builder = replica.make_totals_builder(reports_loss=reports_loss)
        self.waiting_microbatches: dict[int, InFlightMicrobatch] = {}

    def counts(self, data: Sequence[object]) -> Counts:
        """Return the counts of the whole batch, summed over replicas. All stages of a replica have the same samples."""
        contract, world = self._replica.contract, self._replica.worlds.data
        if not contract.has_early_counts:
            return None
        local = local_counts(contract, data)
        if self._names is None:
            self._names = next(names for names in world.gather_json(list(local)) if names)
        return global_counts(local, world=world, names=self._names)

    def start_batch(self, batch: InFlightBatch, *, stop: bool) -> StepResult:
        """Create the batch's totals and result. A rank without loss terms starts the all-reduce of the totals now."""
        batch.reduction = self.totals_builder.new_reduction(batch.step_batch, None, stop=stop)
        samples = batch.step_batch.num_samples
        batch.result = StepResult(
            step=batch.number + 1,
            samples=samples,
            reduction=batch.reduction,
            async_grad_norm=None,
            compute_seconds=0.0,
            communication_seconds=0.0,
        )
        batch.reduction.set_expected_counts(batch.counts or {})
        if not self.reports_loss or not batch.num_left:
            self._report(batch)
        return batch.result

    def forward(self, *, stage: int, microbatch: int, received: StageOutput | None) -> StageOutput | Tensor | None:
        """Run the user's forward, and on the last stage the loss."""
        in_flight, replica = self.waiting_microbatches.pop(microbatch), self._replica
        for recorder in replica.state_recorders:
            recorder.set_microbatch(in_flight.index, has_samples=in_flight.num_samples > 0)
        replica.random_streams.enter(step=in_flight.batch.number, microbatch=in_flight.index)
        with open_all(replica.forward_contexts):
            if in_flight.num_samples:
                return self._pipeline_model.stages.run(stage, received, lambda: self._loss(in_flight))  # type: ignore[no-any-return]
            with replica.zero_weight_context():
                return self._pipeline_model.stages.run(stage, received, lambda: self._loss(in_flight))  # type: ignore[no-any-return]

    def backward_context(self, *, microbatch: int) -> AbstractContextManager[None]:
        """Return an empty context: only context parallelism, which PipeDream does not support, needs another one."""
        return nullcontext()

    def run_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *, microbatch: int) -> None:
        """Run the backward of a stage."""
        run_backward(outputs, gradients)

    def before_backward(self, *, stage: int, microbatch: int) -> None:
        """Do nothing: gradients are sent only when the batch is complete."""

    def after_backward(self, *, stage: int, microbatch: int) -> None:
        """Do nothing: there is nothing to collect."""

    def _loss(self, in_flight: InFlightMicrobatch) -> Tensor:
        """Run the user's forward and loss, and return the loss for backward. Only the last stage reaches the loss."""
        replica, batch = self._replica, in_flight.batch
        with in_flight.local_microbatch.forward_context():
            output = replica.contract.forward(replica.model, in_flight.local_microbatch.data)
        terms = replica.contract.terms(output, in_flight.local_microbatch.data, num_samples=in_flight.num_samples)
        batch.num_left -= 1
        if in_flight.num_samples:
            batch.terms[in_flight.index] = {name: (total.detach(), count) for name, (total, count) in terms.items()}
        if not batch.num_left and batch.reduction is not None:
            self._report(batch)
        if not in_flight.num_samples:
            return torch.stack([total for total, _ in terms.values()]).sum() * 0.0
        return loss_for_backward(terms, batch.counts)

    def _report(self, batch: InFlightBatch) -> None:
        """Store the batch's loss terms in its totals, and start the all-reduce of the totals."""
        assert batch.reduction is not None
        for index, terms in batch.terms.items():
            self.totals_builder.store_terms(batch.reduction, index, terms)
        self.totals_builder.start_reduction(batch.reduction)
