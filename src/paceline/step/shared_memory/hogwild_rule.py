"""The Hogwild rule: workers update the same weights without locks."""

from collections.abc import Iterator

from torch import nn
from typing_extensions import override

from paceline.comm.process_group import World
from paceline.config.settings import Settings
from paceline.errors import JobError, PacelineError
from paceline.job import Job
from paceline.parallel.data_parallel.shared_memory_model import SharedModel
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.step.shared_memory.hogwild import HogwildStep
from paceline.step.step_rule import StepRequest, StepRule
from paceline.step.synchronous import SynchronousStep


class HogwildRule(StepRule):
    """The rule of `--update hogwild`."""

    @override
    def refuse_job(self, job: Job, settings: Settings, plan: ExecutionPlan) -> Iterator[PacelineError]:
        """Yield an error for each feature of the job that the rule does not support."""
        if job.loss_over == "batch":
            yield JobError(
                'loss_over="batch" with --update hogwild: no worker ever has the whole batch.',
                cause="workers don't wait for each other's outputs",
                hint="--update sync",
            )
        if job.ema is not None:
            yield JobError("ema= with --update hogwild: each worker would have its own average.", hint="ema=None")

    @override
    def share_model(self, model: nn.Module, *, world: World) -> SharedModel:
        """Put the weights into memory that all workers share, and return the shared model."""
        return SharedModel(model, world=world)

    @override
    def make_step(self, request: StepRequest) -> SynchronousStep:
        """Return a worker's step."""
        assert request.shared_model is not None
        return HogwildStep(request.contexts[0], shared_model=request.shared_model)

    @override
    def buffer_note(self, policy: str) -> str:
        """Return a line for the user on the shared buffers."""
        return "buffers: one copy in shared memory, to which every worker writes its running statistics"
