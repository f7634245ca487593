"""Forward and backward of microbatches through pipeline stages, in the order of a schedule."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from paceline.parallel.pipeline.chain.stages import StageOutput
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.schedule.program import Action, Op, Program
from paceline.step.forward_backward import (
    OutputObserver,
    StandInMicrobatches,
    evaluate_part,
    loss_for_backward,
    open_all,
    parts_of,
)
from paceline.step.generate import output_logits
from paceline.step.loss.loss_return_value import Terms
from paceline.step.microbatches import StepBatch
from paceline.step.pipeline.schedule_interpreter import ActionObserver, Pipeline
from paceline.step.pipeline.shard_stages import ShardStages
from paceline.step.replica_context import LocalMicrobatch, ReplicaContext
from paceline.step.step_totals import TotalsReduction
from paceline.torch_internals.private_api import run_backward

Counts = dict[str, Tensor] | None
"""The global counts by loss term, or None if they are not known before the forward."""


class PipelineForwardBackward:
    """A runner that executes this rank's part of a pipeline program; the last stage computes the loss."""

    def __init__(self, replica: ReplicaContext, *, pipeline_model: PipelineModel) -> None:
        self._replica = replica
        self._pipeline_model = pipeline_model
        self.reports_loss = pipeline_model.has_loss and replica.worlds.tp.rank == 0
        self._totals_builder = replica.make_totals_builder(reports_loss=self.reports_loss)
        self._stand_ins = StandInMicrobatches(replica)
        self._pipelines: dict[Program, Pipeline] = {}
        self._on_action: ActionObserver | None = None
        context = replica.exact_context
        self._shard_stages = None if context is None else ShardStages(context, pipeline_model=pipeline_model)

    @contextmanager
    def observe_actions(self, on_action: ActionObserver) -> Iterator[None]:
        """Return a context in which `on_action` receives each action with its start and end time.

        On a GPU, each action is finished before the next one starts.
        """
        device = self._replica.world.device

        def report(action: Action, start: float, stop: float) -> None:
            if device.type != "cpu":
                torch.accelerator.synchronize(device)
                stop = time.perf_counter()
            on_action(action, start, stop)

        self._on_action, self._pipelines = report, {}
        try:
            yield
        finally:
            self._on_action, self._pipelines = None, {}

    def program(self, num_micro: int) -> Program:
        """Return the program of all ranks of the pipeline for `num_micro` microbatches."""
        return self._pipeline_model.build_program(num_micro)

    def run(self, step_batch: StepBatch, *, step: int, stop: bool) -> tuple[TotalsReduction, bool]:
        """Run this replica's microbatches, and stand-ins of weight zero if all replicas must run the same number."""
        local_microbatches = [self._replica.load_microbatch(microbatch.data) for microbatch in step_batch.micro]
        counts = self._totals_builder.gather_counts(
            [part.data for local in local_microbatches for part in parts_of(local)]
        )
        num_missing = self._stand_ins.count_missing(step_batch)
        stand_ins = [self._stand_ins.load_stand_in(step_batch, local_microbatches)] * num_missing if num_missing else []
        work = _StepWork(
            self._replica,
            pipeline_model=self._pipeline_model,
            step=step,
            counts=counts,
            shard_stages=self._shard_stages,
        )
        work.indices_and_sizes = [(microbatch.index, microbatch.num_samples) for microbatch in step_batch.micro]
        work.indices_and_sizes += [(step_batch.num_micro, 0)] * num_missing
        work.microbatches = [*local_microbatches, *stand_ins]
        if work.microbatches:
            program = self._pipeline_model.build_program(len(work.microbatches))
            work.num_backwards_left = _num_backwards(program, rank=self._pipeline_model.world.rank)
            self._pipeline(program).run(work)
        reduction = self._totals_builder.new_reduction(step_batch, next(iter(work.terms.values()), None), stop=stop)
        for (position, part), terms in work.terms.items():
            if position < len(step_batch.micro):
                index, shard = step_batch.micro[position].index, self._replica.shard_numbers[part]
                self._totals_builder.store_terms(reduction, index, terms, shard=shard)
        self._totals_builder.start_reduction(reduction)
        reduction.set_expected_counts(counts or {})
        return reduction, counts is None

    def evaluate_microbatch(self, batch: Any, *, num_samples: int, on_output: OutputObserver) -> None:
        """Run the forward of one microbatch. The rank of the last stage calls `on_output`."""
        replica = self._replica
        microbatch = replica.slice_microbatch(batch)

        def run_part(position: int) -> tuple[Any, Terms, Any]:
            part = parts_of(microbatch)[position]
            with open_all(replica.forward_contexts):
                return evaluate_part(replica, part, num_samples=num_samples)

        def report(results: Sequence[tuple[Any, Terms, Any]]) -> None:
            with open_all(replica.forward_contexts):
                for output, terms, data in results:
                    on_output(output, terms, data)

        work = (
            _EvaluationWork(self._pipeline_model, lambda: report([run_part(0)]))
            if self._shard_stages is None
            else _ShardedEvaluationWork(self._shard_stages, run_part, report, length=microbatch.length)
        )
        self._pipeline(self._pipeline_model.build_forward_program(1)).run(work)

    def compute_logits(self, model: nn.Module, tensor: Tensor) -> Tensor:
        """Run one forward through the stages and broadcast the last stage's output to all ranks."""
        logits: list[Tensor] = []
        self._pipeline(self._pipeline_model.build_forward_program(1)).run(
            _EvaluationWork(self._pipeline_model, lambda: logits.append(output_logits(model(tensor))))
        )
        world, source = self._pipeline_model.world, self._pipeline_model.build_forward_program(1).loss_rank
        shape, dtype_name = world.share_json(
            [list(logits[0].shape), str(logits[0].dtype).removeprefix("torch.")] if logits else None, source=source
        )
        if not logits:
            logits.append(torch.empty(shape, dtype=getattr(torch, dtype_name), device=world.device))
        return world.broadcast(logits[0].contiguous(), source=source)

    def _pipeline(self, program: Program) -> Pipeline:
        if program not in self._pipelines:
            pipeline_model = self._pipeline_model
            self._pipelines[program] = Pipeline(
                program,
                world=pipeline_model.world,
                splits_backward=pipeline_model.can_split_backward,
                on_action=self._on_action,
            )
        return self._pipelines[program]


class _StepWork:
    """The `StageWork` of one step. `microbatches` are this replica's microbatches, followed by its stand-ins.

    `indices_and_sizes` has the index in the global batch and the number of samples of each microbatch.
    """

    def __init__(
        self,
        replica: ReplicaContext,
        *,
        pipeline_model: PipelineModel,
        step: int,
        counts: Counts,
        shard_stages: ShardStages | None,
    ) -> None:
        self._replica = replica
        self._shard_stages = shard_stages
        self._pipeline_model = pipeline_model
        self._step = step
        self._counts = counts
        self.indices_and_sizes: list[tuple[int, int]] = []
        self.microbatches: list[LocalMicrobatch] = []
        self.terms: dict[tuple[int, int], Terms] = {}  # by microbatch and part
        self.num_backwards_left = 0

    def forward(self, *, stage: int, microbatch: int, received: StageOutput | None) -> Any:
        """Run the user's forward, and on the last stage the loss."""
        replica, (index, num_samples) = self._replica, self.indices_and_sizes[microbatch]
        for recorder in replica.state_recorders:
            recorder.set_microbatch(index, has_samples=num_samples > 0)
        replica.random_streams.enter(step=self._step, microbatch=index)
        with open_all([] if num_samples else [replica.zero_weight_context]):
            if self._shard_stages is not None:
                return self._shard_stages.forward(
                    lambda position: self._loss(microbatch, num_samples, part=position),
                    stage=stage,
                    received=received,
                    length=self.microbatches[microbatch].length,
                    is_training=True,
                )
            return self._pipeline_model.stages.run(stage, received, lambda: self._loss(microbatch, num_samples))

    def backward_context(self, *, microbatch: int) -> AbstractContextManager[None]:
        """Return the context that the microbatch's backward runs in."""
        return self.microbatches[microbatch].backward_context()

    def run_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *, microbatch: int) -> None:
        """Run the backward of a stage, or that of each sequence shard."""
        if self._shard_stages is None:
            with self.backward_context(microbatch=microbatch):
                run_backward(outputs, gradients)
        else:
            contexts = [part.backward_context for part in parts_of(self.microbatches[microbatch])]
            self._shard_stages.backward(outputs, gradients, contexts)

    def before_backward(self, *, stage: int, microbatch: int) -> None:
        """Prepare the reducer for this backward. In the step's last backward, it starts the final reduction."""
        index, num_samples = self.indices_and_sizes[microbatch]
        for recorder in self._replica.state_recorders:
            recorder.set_microbatch(index, has_samples=num_samples > 0)
        self.num_backwards_left -= 1
        self._replica.reducer.before_backward(last=self.num_backwards_left == 0, has_samples=num_samples > 0)

    def after_backward(self, *, stage: int, microbatch: int) -> None:
        """Pass the gradients to the reducer."""
        self._replica.reducer.after_backward()

    def _loss(self, microbatch: int, num_samples: int, *, part: int = 0) -> Tensor:
        """Run the user's forward and loss, and return the loss for backward. Only the last stage reaches the loss."""
        replica, local_part = self._replica, parts_of(self.microbatches[microbatch])[part]
        with open_all(replica.forward_contexts):
            with local_part.forward_context():
                output = replica.contract.forward(replica.model, local_part.data)
            terms = replica.contract.terms(output, local_part.data, num_samples=num_samples)
            self.terms[microbatch, part] = {name: (total.detach(), count) for name, (total, count) in terms.items()}
            if not num_samples:
                return torch.stack([total for total, _ in terms.values()]).sum() * 0.0
            return replica.update.scale_loss(loss_for_backward(terms, self._counts))


class _ForwardOnlyWork:
    """The backward of a `StageWork` that has no gradients."""

    def backward_context(self, *, microbatch: int) -> AbstractContextManager[None]:
        """Return an empty context; there is no backward."""
        return nullcontext()

    def run_backward(self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *, microbatch: int) -> None:
        """Do nothing; there is no backward."""

    def before_backward(self, *, stage: int, microbatch: int) -> None:
        """Do nothing; there is no backward."""

    def after_backward(self, *, stage: int, microbatch: int) -> None:
        """Do nothing; there is no backward."""


class _EvaluationWork(_ForwardOnlyWork):
    """The `StageWork` of a forward without gradients."""

    def __init__(self, pipeline_model: PipelineModel, run_model: Callable[[], None]) -> None:
        self._pipeline_model = pipeline_model
        self._run_model = run_model

    def forward(self, *, stage: int, microbatch: int, received: StageOutput | None) -> Any:
        return self._pipeline_model.stages.run(stage, received, self._run_model)


class _ShardedEvaluationWork(_ForwardOnlyWork):
    """The `StageWork` of forwards of sequence shards without gradients; `report` gets the results of all of them."""

    def __init__(
        self,
        shard_stages: ShardStages,
        run_part: Callable[[int], Any],
        report: Callable[[Sequence[Any]], None],
        *,
        length: int,
    ) -> None:
        self._shard_stages, self._run_part, self._report, self._length = shard_stages, run_part, report, length

    def forward(self, *, stage: int, microbatch: int, received: StageOutput | None) -> Any:
        output = self._shard_stages.forward(self._run_part, stage=stage, received=received, length=self._length)
        if isinstance(output, StageOutput):
            return output
        self._report(output)
        return None


def _num_backwards(program: Program, *, rank: int) -> int:
    """Return how many of a rank's actions add weight gradients."""
    actions: Sequence[Any] = program.actions[rank]
    return sum(action.op in (Op.BACKWARD, Op.BACKWARD_WEIGHT) for action in actions)
