"""The rules of local SGD and DiLoCo: sites train on their own and synchronise every few steps."""

from dataclasses import replace

from torch import nn

from paceline.bytes_sent import Traffic
from paceline.comm.mesh_groups import MeshGroups
from paceline.comm.process_group import World
from paceline.console.formatting import plural
from paceline.parallel.data_parallel.module_buffers import buffer_notes
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.step.local_sgd.fragment_schedule import FragmentSchedule
from paceline.step.local_sgd.local_sgd_step import LocalStep
from paceline.step.pipeline.pipeline_forward_backward import PipelineForwardBackward
from paceline.step.step_rule import RuleTraits, StepRequest
from paceline.step.synchronous import SynchronousStep


class LocalSgdRule:
    """The rules of `--update local` and `--update diloco`."""

    traits = RuleTraits(verified="freely")

    def groups(self, worlds: MeshGroups, *, plan: ExecutionPlan) -> MeshGroups:
        """Return the groups of this rank's site."""
        return MeshGroups.for_local_sgd_site(worlds.every, mesh=plan.mesh)

    def share_model(self, model: nn.Module, *, world: World) -> None:
        """Return nothing: each process has its own model."""

    def make_step(self, request: StepRequest) -> SynchronousStep:
        """Return a site's step, with the optimizer that moves the weights all sites have agreed on."""
        plan, parts, placed, replicas = request.plan, request.parts[0], request.placed, request.replicas
        passes = None if placed.piped is None else PipelineForwardBackward(parts, piped=placed.piped)
        sites = FragmentSchedule(
            rule=plan.rule,
            named=placed.named,
            weights=placed.weights,
            peers=replace(replicas, traffic=Traffic()),
            spread=placed.spread,
            wrote=parts.buffers.begin,
        )
        return LocalStep(parts, sites=sites, first=replicas.rank * plan.mesh.dp_shard, passes=passes)

    def identity(self, plan: ExecutionPlan, piped: PipelineModel | None) -> str:
        """Return the rule and the number of sites."""
        return f"{plan.rule} of {plural(plan.mesh.dp_replicate, 'site')}"

    def buffer_note(self, policy: str) -> str:
        """Return the line on the policy within a site, and the average over sites."""
        return buffer_notes(policy, is_race=False, has_sites=True)
