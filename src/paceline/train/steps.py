"""The step of a run, by its plan."""

from collections.abc import Sequence
from dataclasses import replace

from paceline.errors import LayoutError, PacelineError, raise_all
from paceline.place.batchnorm import running
from paceline.place.compose import Placed
from paceline.place.shared import SharedModel
from paceline.place.stage.pipe import Piped
from paceline.place.threads import Mirror
from paceline.plan.settle import Plan
from paceline.plan.stashed import stash_of
from paceline.step.hogwild import HogwildStep
from paceline.step.local import LocalStep
from paceline.step.parts import Parts
from paceline.step.passes import Passes
from paceline.step.piped import PipelinePasses
from paceline.step.server import ServerStep
from paceline.step.sites import Sites
from paceline.step.spmd import SpmdStep
from paceline.step.stash import StashStep
from paceline.step.threads import ThreadsStep
from paceline.step.turns import SharedTurns
from paceline.traffic import Traffic
from paceline.train.served import refuse_served
from paceline.world import World


def make_step(
    plan: Plan,
    parts: Sequence[Parts],
    placed: Placed,
    mirror: Mirror | None,
    turns: SharedTurns | None,
    shared: SharedModel | None,
    *,
    replicas: World,
) -> SpmdStep:
    """How this process's replicas turn a batch into an update; `replicas` are this rank's mirrors in the others."""
    if placed.piped is not None and plan.rule.is_stashed:
        _refuse_stashed(parts[0], placed, placed.piped, plan)
        stash = stash_of(plan.rule, plan.mesh)
        return StashStep(parts[0], piped=placed.piped, stash=stash, rounds=-(-plan.num_micro // plan.replicas))
    if plan.rule.has_servers:
        refuse_served(parts[0], plan)
        return ServerStep(
            parts[0],
            rule=plan.rule,
            shares=plan.replicas,
            micro_batch_size=plan.micro_batch_size,
            spread=placed.spread,
        )
    if shared is not None:
        return HogwildStep(parts[0], shared=shared)
    passes = None if placed.piped is None else PipelinePasses(parts[0], piped=placed.piped)
    if plan.rule.has_sites:
        return _local(plan, parts[0], placed, passes, replicas)
    if mirror is None or turns is None:
        return SpmdStep(parts[0], passes=passes)
    return ThreadsStep(parts[0], others=parts[1:], mirror=mirror, turns=turns)


def _local(plan: Plan, parts: Parts, placed: Placed, passes: Passes | None, replicas: World) -> LocalStep:
    sites = Sites(
        rule=plan.rule,
        named=placed.named,
        weights=placed.weights,
        peers=replace(replicas, traffic=Traffic()),
        spread=placed.spread,
        wrote=parts.buffers.begin,
    )
    return LocalStep(parts, sites=sites, first=replicas.rank * plan.mesh.dp_shard, passes=passes)


def _refuse_stashed(parts: Parts, placed: Placed, piped: Piped, plan: Plan) -> None:
    """What a model has that stages with weights of several times can't.

    Raises:
        LayoutError, Problems
    """
    found: list[PacelineError] = []
    for name, ranks in sorted(piped.ties.items())[:1]:
        found.append(
            LayoutError(
                f"--update {plan.update}: {name} is used in the stages of ranks {', '.join(map(str, ranks))}.",
                cause="its gradients come at different times on each, and its copies would part",
                hint="a model whose weights are not tied over stages, or --update sync",
            )
        )
    for name in placed.hooked[:1]:
        found.append(
            LayoutError(
                f"--update {plan.update} puts weights of other times in the place of {name}, and the hook on it would "
                "never be called.",
                cause="register_hook or register_post_accumulate_grad_hook on a parameter in model=",
                hint="the same in loss= or optimizer=, or --update sync",
            )
        )
    names = [name for name, _ in running(parts.model)]
    if names:
        found.append(
            LayoutError(
                f"--update {plan.update}: {names[0]} keeps running statistics.",
                cause="they would be of microbatches in another order, on weights of several times",
                hint="LayerNorm or GroupNorm in its place, or --update sync",
            )
        )
    raise_all(found)
