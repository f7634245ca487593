"""The one-process oracle of a plan: the plain one, or that of a rule or a method of its own."""

from collections.abc import Callable
from functools import partial

from paceline.plan.settle import Plan
from paceline.plan.stashed import stash_of
from paceline.prove.compressed import CompressedReference
from paceline.prove.free import Drift
from paceline.prove.local import LocalReference, meeting_of
from paceline.prove.reference import Reference
from paceline.prove.served import ServedReference
from paceline.prove.stashed import StashedReference, Way, stages_of
from paceline.train.built import Built

_TIGHT = 1e-6  # of float64, where an element is seldom rounded otherwise
_LATE = "other weights for a microbatch than the rule's, gradients, loss, or evaluation"
_SITES = "samples, gradients or optimizer of a site, other meetings than the rule's, or evaluation"
_WIRE = "another choice, scale or factor, what is held back lost or counted twice, samples, loss, evaluation"


def oracle_of(built: Built) -> Callable[..., Reference]:
    """What makes it, for stages that choose their weights by a rule, servers, sites, replicas that compress."""
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
    way = Way(stash=stash_of(plan.rule, plan.mesh), stage_of=stages, replicas=plan.replicas)
    return partial(StashedReference, way=way)


def apart_by(plan: Plan, *, is_double: bool) -> tuple[str, Drift]:
    """What running freely beside it rules out, and how far the two may be apart."""
    if not plan.wire.is_on:
        return (_SITES if plan.rule.has_sites else _LATE), Drift()
    return _WIRE, Drift(share=_TIGHT if is_double else Drift.share, cause=f"the runs part: {_WIRE}")
