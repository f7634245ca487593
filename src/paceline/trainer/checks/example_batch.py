"""The example batch: one microbatch that runs through the full model, to plan how to split the model over ranks."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from paceline.config.settings import Settings
from paceline.data.types import BatchPartition
from paceline.errors import JobError, LayoutError, user_line
from paceline.job import Job
from paceline.parallel.module_access.tensor_access import copy_into
from paceline.parallel.module_access.user_call_isolation import call_stateless
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.step.loss.loss_return_value import LossContract
from paceline.torch_internals.dispatch_modes import hide_from_modes
from paceline.torch_internals.pytree import to_device
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.setup.job_data import JobData, read_first

SMALL_BATCH_SIZE = 2  # a single sample may take another code path
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class ExampleBatch:
    """The run's first microbatch. A call runs forward and loss on it, with equal results on every rank.

    The call restores the model's buffers and training mode, and the random generators.
    """

    job: Job
    settings: Settings
    plan: ExecutionPlan
    model: nn.Module
    contract: LossContract
    device: torch.device
    data: JobData | None = None

    def __call__(self) -> Any:
        """Return the sums of the loss terms, computed in training mode."""
        with hide_from_modes():  # planning records which buffers the forward itself uses
            saved_buffers = [(buffer, buffer.detach().clone()) for buffer in self.model.buffers()]
        was_training = self.model.training
        self.model.train()
        try:
            with preserve_rng():
                return self.run(self.model)
        finally:
            self.model.train(was_training)
            with hide_from_modes():
                for buffer, value in saved_buffers:
                    copy_into(buffer.data, value)

    def run(self, model: nn.Module) -> Any:
        """Return the sums of the loss terms of this model, which is the job's own or a copy."""
        try:
            with call_stateless(self.job.loss):
                output = self.contract.forward(model, self.batch)
                terms = self.contract.terms(output, self.batch, num_samples=self.plan.micro_batch_size)
        except RuntimeError as error:
            if torch.is_grad_enabled() or "does not require grad and does not have a grad_fn" not in str(error):
                raise
            raise LayoutError(
                "the forward or the loss takes a gradient (torch.autograd.grad), but to split the model, Paceline "
                "first runs it without gradients.",
                where=str(user_line(error) or ""),
                cause="a gradient penalty, or a model that returns the gradient of an energy",
                hint="--layout ddp, zero1 or zero2, which need no such run",
            ) from error
        return {name: total for name, (total, _) in terms.items()}

    def once(self, key: Hashable, find: Callable[[], Result]) -> Result:
        """Return the result of `find`, which runs the model. Copies of one model share the first result for a `key`."""
        cache = getattr(self.job.model, "shared_results", None)
        if not isinstance(cache, dict):
            return find()
        key = (key, self.plan.micro_batch_size)
        if key not in cache:
            cache[key] = find()
        result: Result = cache[key]
        return result

    def learn_loss(self) -> None:
        """Find out whether the model's own loss is a sum or a mean. Call this before any forward is traced."""
        self.contract.probe_model_loss(self.batch)

    @cached_property
    def batch(self) -> Any:
        """The first microbatch.

        Raises:
            JobError: the data can't be read twice.
        """
        return self._read_first(self.plan.micro_batch_size)

    @cached_property
    def small_batch(self) -> Any:
        """A few samples of the first microbatch: enough to check that a split model gives the same result."""
        num_samples = min(SMALL_BATCH_SIZE, self.plan.micro_batch_size)
        return self.batch if num_samples == self.plan.micro_batch_size else self._read_first(num_samples)

    def _read_first(self, num_samples: int) -> Any:
        if hasattr(self.job.train_data, "__next__"):
            raise JobError(
                "train_data is a generator, but this layout reads a sample before the first step.",
                cause="a generator can be read only once, so training would miss that sample",
                hint="train_data=the generator function itself, without calling it",
            )
        partition = BatchPartition(global_batch_size=num_samples, micro_batch_size=num_samples)
        data, seeds = self.data or JobData(self.job, self.settings), self.settings.data.sample_seeds
        step_batch = read_first(data, self.settings, partition=partition, sample_seeds=seeds)[0]
        return to_device(step_batch.micro[0].data, self.device)
