"""The rules of PipeDream and 2BW: a pipeline that is never flushed, with weight stashing."""

from typing_extensions import override

from paceline.config.update_rule import UpdateKind
from paceline.console.formatting import plural
from paceline.errors import LayoutError, PacelineError, raise_all
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.parallel.placement import ParallelizedModel
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.pipedream_checks import build_version_rule
from paceline.step.pipedream.pipedream_step import PipeDreamStep
from paceline.step.replica_context import ReplicaContext
from paceline.step.step_rule import RuleTraits, StepRequest, StepRule
from paceline.step.synchronous import SynchronousStep


class WeightStashingRule(StepRule):
    """The rules of `--update pipedream` and `--update 2bw`."""

    traits = RuleTraits(measures_joint_norm=False, verify_mode="freely")

    @override
    def make_step(self, request: StepRequest) -> SynchronousStep:
        """Return the step of this rank's stage, or the synchronous step if there is no pipeline."""
        plan, pipeline_model = request.plan, request.parallelized_model.pipeline_model
        if pipeline_model is None:
            return SynchronousStep(request.contexts[0])
        _refuse_unsupported_model(request.contexts[0], request.parallelized_model, pipeline_model, plan)
        num_microbatches = -(-plan.num_micro // plan.replicas)
        return PipeDreamStep(
            request.contexts[0],
            pipeline_model=pipeline_model,
            version_rule=build_version_rule(plan.update_rule, plan.mesh),
            num_microbatches=num_microbatches,
        )

    @override
    def identity(self, plan: ExecutionPlan, pipeline_model: PipelineModel | None) -> str:
        """Return the rule. For PipeDream, add the stages; with 2BW, the results do not depend on them."""
        if pipeline_model is None or plan.update_rule.kind is not UpdateKind.PIPEDREAM:
            return str(plan.update_rule)
        num_microbatches = -(-plan.num_micro // plan.replicas)
        blocks = "-".join(str(stop - start) for start, stop in pipeline_model.split.bounds)
        per_replica = f"{plural(num_microbatches, 'microbatch')} of a replica"
        return f"{plan.update_rule} in {pipeline_model.split.num_stages} stages of {blocks} blocks, {per_replica}"


def _refuse_unsupported_model(
    replica: ReplicaContext, parallelized: ParallelizedModel, pipeline_model: PipelineModel, plan: ExecutionPlan
) -> None:
    """Raise an error for each feature of the model that weight stashing does not support.

    Raises:
        LayoutError, Problems
    """
    errors: list[PacelineError] = []
    for name, ranks in sorted(pipeline_model.ties.items())[:1]:
        errors.append(
            LayoutError(
                f"--update {plan.update}: {name} is used in the stages of ranks {', '.join(map(str, ranks))}.",
                cause="its gradients arrive at different times on each stage, so its copies would diverge",
                hint="use a model without weights tied over stages, or --update sync",
            )
        )
    for name in parallelized.hooked_names[:1]:
        errors.append(
            LayoutError(
                f"--update {plan.update} replaces {name} by other weight versions, and the hook on it would "
                "never be called.",
                cause="register_hook or register_post_accumulate_grad_hook on a parameter in model=",
                hint="move the hook's work into loss= or optimizer=; or --update sync",
            )
        )
    names = [name for name, _ in norms_with_statistics(replica.model)]
    if names:
        errors.append(
            LayoutError(
                f"--update {plan.update}: {names[0]} keeps running statistics.",
                cause="they would come from microbatches in a different order, on several weight versions",
                hint="LayerNorm or GroupNorm instead, or --update sync",
            )
        )
    raise_all(errors)
