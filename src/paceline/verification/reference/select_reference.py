"""The one-process reference of each update rule and of compression, and how `verify` compares a run with it."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

from typing_extensions import override

from paceline.config.update_rule import UpdateKind
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.pipedream_checks import build_version_rule
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.compare_in_lockstep import ReportProgress
from paceline.verification.compare_independent_runs import WeightDrift, compare_free_run
from paceline.verification.reference.compressed import CompressedReference
from paceline.verification.reference.local_sgd import LocalSgdReference, SyncRule
from paceline.verification.reference.parameter_server import ParameterServerReference, compare_parameter_server_run
from paceline.verification.reference.pipedream import PipeDreamReference, PipeDreamRule, map_stages
from paceline.verification.reference.reference import Reference
from paceline.verification.rung_result import RungResult

# The allowed `WeightDrift.fraction` in float64. There, rounding errors seldom change what the compression does with an
# element: whether it is selected, and to which value it is quantised.
_FLOAT64_DRIFT = 1e-6
_COMPRESSION_FAULTS = (
    "a different selection, scale or factor; error feedback lost or counted twice; "
    "different samples, loss or evaluation"
)


class RuleReference:
    """The comparison of one update rule's runs with one process.

    The methods' defaults are those of the synchronous rule. `rules_out` lists the errors that a comparison of
    independent runs would find.
    """

    rules_out: ClassVar[str] = "wrong gradients, loss or evaluation; a microbatch on weights of a wrong version"

    def reference_constructor(self, setup: TrainingSetup) -> Callable[..., Reference]:
        """Return the constructor of the reference."""
        return Reference

    def compare(
        self,
        setup: TrainingSetup,
        *,
        reference: Reference | None,
        steps: int,
        report_progress: ReportProgress,
        drift: WeightDrift | None,
    ) -> RungResult:
        """Run the layout freely and compare the result with the reference, which only rank 0 has."""
        return compare_free_run(setup, reference=reference, steps=steps, report_progress=report_progress, drift=drift)


class _PipeDreamComparison(RuleReference):
    @override
    def reference_constructor(self, setup: TrainingSetup) -> Callable[..., Reference]:
        plan, pipeline_model = setup.plan, setup.parallelized_model.pipeline_model
        if pipeline_model is None:
            return Reference
        stages = map_stages(pipeline_model, setup.weights.names)
        pipedream_rule = PipeDreamRule(
            version_rule=build_version_rule(plan.update_rule, plan.mesh), stage_of=stages, replicas=plan.replicas
        )
        return partial(PipeDreamReference, rule=pipedream_rule)


class _LocalSgdComparison(RuleReference):
    rules_out = "wrong samples, gradients or optimizer of a site; wrong synchronisation; wrong evaluation"

    @override
    def reference_constructor(self, setup: TrainingSetup) -> Callable[..., Reference]:
        rule, mesh = setup.plan.update_rule, setup.plan.mesh
        sync_rule = SyncRule(rule=rule, sites=mesh.dp_replicate, replicas_per_site=mesh.dp_shard)
        return partial(LocalSgdReference, sync_rule=sync_rule)


class _ParameterServerComparison(RuleReference):
    """The comparison for a parameter server.

    With a staleness of 0, the shares of a batch form one update, so the reference needs no record of their order.
    """

    @override
    def reference_constructor(self, setup: TrainingSetup) -> Callable[..., Reference]:
        return ParameterServerReference if setup.plan.update_rule.staleness > 0 else Reference

    @override
    def compare(
        self,
        setup: TrainingSetup,
        *,
        reference: Reference | None,
        steps: int,
        report_progress: ReportProgress,
        drift: WeightDrift | None,
    ) -> RungResult:
        if setup.plan.update_rule.staleness > 0:
            return compare_parameter_server_run(
                setup, reference=reference, steps=steps, report_progress=report_progress
            )
        return compare_free_run(setup, reference=reference, steps=steps, report_progress=report_progress, drift=drift)


RULE_REFERENCES: Mapping[UpdateKind, RuleReference] = {
    UpdateKind.SYNC: RuleReference(),
    UpdateKind.PIPEDREAM: _PipeDreamComparison(),
    UpdateKind.DOUBLE: _PipeDreamComparison(),
    UpdateKind.HOGWILD: RuleReference(),  # `verify` refuses it
    UpdateKind.LOCAL: _LocalSgdComparison(),
    UpdateKind.DILOCO: _LocalSgdComparison(),
    UpdateKind.PS: _ParameterServerComparison(),
}


def rule_reference(plan: ExecutionPlan) -> RuleReference:
    """Return the `RuleReference` of the plan's update rule."""
    return RULE_REFERENCES[plan.update_rule.kind]


def select_reference(setup: TrainingSetup) -> Callable[..., Reference]:
    """Return the reference's constructor: for compression if gradients are compressed, else for the update rule."""
    plan = setup.plan
    if plan.compression.is_on:
        return partial(CompressedReference, compression=plan.compression, replicas=plan.replicas)
    return rule_reference(plan).reference_constructor(setup)


def allowed_drift(plan: ExecutionPlan, *, is_double: bool) -> tuple[str, WeightDrift]:
    """Return which errors a comparison of independent runs rules out, and how far the two runs may diverge."""
    if not plan.compression.is_on:
        return rule_reference(plan).rules_out, WeightDrift()
    return _COMPRESSION_FAULTS, WeightDrift(
        fraction=_FLOAT64_DRIFT if is_double else WeightDrift.fraction, cause=f"the runs diverge: {_COMPRESSION_FAULTS}"
    )
