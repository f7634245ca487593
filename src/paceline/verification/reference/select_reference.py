"""The table of one-process references: how `verify` compares the runs of each update rule, or of compression."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import ClassVar

from paceline.config.update_rule import UpdateKind
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.pipedream_checks import stash_of
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.compare_in_lockstep import Say
from paceline.verification.compare_independent_runs import WeightDrift, run_free
from paceline.verification.reference.compressed import CompressedReference
from paceline.verification.reference.local_sgd import LocalReference, SyncRule
from paceline.verification.reference.parameter_server import ServedReference, run_served
from paceline.verification.reference.pipedream import PipeDreamRule, StashedReference, stages_of
from paceline.verification.reference.reference import Reference
from paceline.verification.rung_result import RungResult

_TIGHT = 1e-6  # for float64, in which an element is seldom rounded differently
_WIRE = "a different selection, scale or factor, error feedback lost or counted twice, samples, loss, evaluation"


class RuleReference:
    """How the runs of one update rule are compared with one process. The defaults are those of the synchronous rule.

    `rules_out` says which errors a comparison of independent runs would show.
    """

    rules_out: ClassVar[str] = "different weights for a microbatch than the rule's, gradients, loss, or evaluation"

    def reference(self, built: TrainingSetup) -> Callable[..., Reference]:
        """Return the constructor of the reference."""
        return Reference

    def compare(
        self, built: TrainingSetup, *, reference: Reference | None, steps: int, say: Say, drift: WeightDrift | None
    ) -> RungResult:
        """Run the layout freely and compare the result with the reference, which only rank 0 has."""
        return run_free(built, reference=reference, steps=steps, say=say, drift=drift)


class _StashedRuns(RuleReference):
    def reference(self, built: TrainingSetup) -> Callable[..., Reference]:
        plan, piped = built.plan, built.placed.piped
        if piped is None:
            return Reference
        stages = stages_of(piped, built.weights.names)
        way = PipeDreamRule(stash=stash_of(plan.rule, plan.mesh), stage_of=stages, replicas=plan.replicas)
        return partial(StashedReference, way=way)


class _SiteRuns(RuleReference):
    rules_out = "samples, gradients or optimizer of a site, different synchronisation than the rule's, or evaluation"

    def reference(self, built: TrainingSetup) -> Callable[..., Reference]:
        rule, mesh = built.plan.rule, built.plan.mesh
        meeting = SyncRule(rule=rule, sites=mesh.dp_replicate, replicas=mesh.dp_shard)
        return partial(LocalReference, meeting=meeting)


class _ServedRuns(RuleReference):
    """With a staleness of 0 the shares of a batch form one update, so one process needs no record of their order."""

    def reference(self, built: TrainingSetup) -> Callable[..., Reference]:
        return ServedReference if built.plan.rule.staleness > 0 else Reference

    def compare(
        self, built: TrainingSetup, *, reference: Reference | None, steps: int, say: Say, drift: WeightDrift | None
    ) -> RungResult:
        if built.plan.rule.staleness > 0:
            return run_served(built, reference=reference, steps=steps, say=say)
        return run_free(built, reference=reference, steps=steps, say=say, drift=drift)


RULE_REFERENCES: Mapping[UpdateKind, RuleReference] = {
    UpdateKind.SYNC: RuleReference(),
    UpdateKind.PIPEDREAM: _StashedRuns(),
    UpdateKind.DOUBLE: _StashedRuns(),
    UpdateKind.HOGWILD: RuleReference(),  # `verify` refuses it
    UpdateKind.LOCAL: _SiteRuns(),
    UpdateKind.DILOCO: _SiteRuns(),
    UpdateKind.PS: _ServedRuns(),
}


def rule_reference(plan: ExecutionPlan) -> RuleReference:
    """Return the object that answers for the plan's update rule."""
    return RULE_REFERENCES[plan.rule.kind]


def select_reference(built: TrainingSetup) -> Callable[..., Reference]:
    """Return the constructor of the reference, of the compression if gradients are compressed, else of the rule."""
    plan = built.plan
    if plan.wire.is_on:
        return partial(CompressedReference, how=plan.wire, replicas=plan.replicas)
    return rule_reference(plan).reference(built)


def allowed_drift(plan: ExecutionPlan, *, is_double: bool) -> tuple[str, WeightDrift]:
    """Return what a comparison of independent runs rules out, and how far the two runs may diverge."""
    if not plan.wire.is_on:
        return rule_reference(plan).rules_out, WeightDrift()
    return _WIRE, WeightDrift(share=_TIGHT if is_double else WeightDrift.share, cause=f"the runs diverge: {_WIRE}")
