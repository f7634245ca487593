"""Choose the one-process reference of a plan: the plain one, or that of its update rule or compression."""

from collections.abc import Callable
from functools import partial

from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.planner.layout.pipedream_checks import stash_of
from paceline.trainer.setup.build_training_setup import TrainingSetup
from paceline.verification.compare_independent_runs import WeightDrift
from paceline.verification.reference.compressed import CompressedReference
from paceline.verification.reference.local_sgd import LocalReference, meeting_of
from paceline.verification.reference.parameter_server import ServedReference
from paceline.verification.reference.pipedream import PipeDreamRule, StashedReference, stages_of
from paceline.verification.reference.reference import Reference

_TIGHT = 1e-6  # for float64, in which an element is seldom rounded differently
_LATE = "different weights for a microbatch than the rule's, gradients, loss, or evaluation"
_SITES = "samples, gradients or optimizer of a site, different synchronisation than the rule's, or evaluation"
_WIRE = "a different selection, scale or factor, error feedback lost or counted twice, samples, loss, evaluation"


def oracle_of(built: TrainingSetup) -> Callable[..., Reference]:
    """Return the constructor of the reference, for weight stashing, servers, sites, compression, or none of these."""
    plan, piped = built.plan, built.placed.piped
    if plan.wire.is_on:
        return partial(CompressedReference, how=plan.wire, replicas=plan.replicas)
    if plan.rule.has_servers and plan.rule.staleness > 0:
        return ServedReference
    meeting = meeting_of(plan.rule, plan.mesh)
    if meeting is not None:
        return partial(LocalReference, meeting=meeting)
    if piped is None or not plan.rule.is_stashed:
        return Reference
    stages = stages_of(piped, built.weights.names)
    way = PipeDreamRule(stash=stash_of(plan.rule, plan.mesh), stage_of=stages, replicas=plan.replicas)
    return partial(StashedReference, way=way)


def apart_by(plan: ExecutionPlan, *, is_double: bool) -> tuple[str, WeightDrift]:
    """Return what a free run rules out, and how far the two runs may diverge."""
    if not plan.wire.is_on:
        return (_SITES if plan.rule.has_sites else _LATE), WeightDrift()
    return _WIRE, WeightDrift(share=_TIGHT if is_double else WeightDrift.share, cause=f"the runs diverge: {_WIRE}")
