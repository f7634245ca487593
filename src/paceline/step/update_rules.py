"""The table of update rules. To add a rule, write a package in `step/` and add its object to `STEP_RULES`."""

from collections.abc import Mapping

from typing_extensions import override

from paceline.config.update_rule import UpdateKind, UpdateRule
from paceline.step.local_sgd.local_sgd_rule import LocalSgdRule
from paceline.step.parameter_server.parameter_server_rule import ParameterServerRule
from paceline.step.pipedream.pipedream_rule import WeightStashingRule
from paceline.step.pipeline.pipeline_forward_backward import PipelineForwardBackward
from paceline.step.shared_memory.hogwild_rule import HogwildRule
from paceline.step.shared_memory.threads_step import ThreadsStep
from paceline.step.step_rule import StepRequest, StepRule
from paceline.step.synchronous import SynchronousStep


class SynchronousRule(StepRule):
    """The rule of `--update sync`, with replicas that are processes or threads."""

    @override
    def make_step(self, request: StepRequest) -> SynchronousStep:
        """Return the synchronous step of a pipeline, of threads, or of one replica."""
        contexts, pipeline_model = request.contexts, request.parallelized_model.pipeline_model
        forward_backward = (
            None if pipeline_model is None else PipelineForwardBackward(contexts[0], pipeline_model=pipeline_model)
        )
        if request.thread_replicas is None or request.rng_turns is None:
            return SynchronousStep(contexts[0], forward_backward=forward_backward)
        return ThreadsStep(
            contexts[0],
            other_replicas=contexts[1:],
            thread_replicas=request.thread_replicas,
            rng_turns=request.rng_turns,
        )


STEP_RULES: Mapping[UpdateKind, StepRule] = {
    UpdateKind.SYNC: SynchronousRule(),
    UpdateKind.PIPEDREAM: WeightStashingRule(),
    UpdateKind.DOUBLE: WeightStashingRule(),
    UpdateKind.HOGWILD: HogwildRule(),
    UpdateKind.LOCAL: LocalSgdRule(),
    UpdateKind.DILOCO: LocalSgdRule(),
    UpdateKind.PS: ParameterServerRule(),
}


def step_rule(update: UpdateRule) -> StepRule:
    """Return the object that implements this update rule."""
    return STEP_RULES[update.kind]
