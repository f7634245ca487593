"""The table of update rules. A new rule is a package in `step/` with an object here."""

from collections.abc import Mapping

from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.comm.process_group import World
from paceline.config.update_rule import UpdateKind, UpdateRule
from paceline.parallel.data_parallel.module_buffers import buffer_notes
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.step.local_sgd.local_sgd_rule import LocalSgdRule
from paceline.step.parameter_server.parameter_server_rule import ParameterServerRule
from paceline.step.pipedream.pipedream_rule import WeightStashingRule
from paceline.step.pipeline.pipeline_forward_backward import PipelineForwardBackward
from paceline.step.shared_memory.hogwild_rule import HogwildRule
from paceline.step.shared_memory.threads_step import ThreadsStep
from paceline.step.step_rule import RuleTraits, StepRequest, StepRule
from paceline.step.synchronous import SynchronousStep


class SynchronousRule:
    """The rule of `--update sync`, with replicas that are processes or threads."""

    traits = RuleTraits()

    def groups(self, worlds: MeshGroups, *, plan: ExecutionPlan) -> MeshGroups:
        """Return all groups: all ranks have the same weights."""
        return worlds

    def share_model(self, model: nn.Module, *, world: World) -> None:
        """Return nothing: each process has its own model."""

    def make_step(self, request: StepRequest) -> SynchronousStep:
        """Return the synchronous step, of a pipeline, of threads, or of one replica."""
        parts, piped = request.parts, request.placed.piped
        passes = None if piped is None else PipelineForwardBackward(parts[0], piped=piped)
        if request.mirror is None or request.turns is None:
            return SynchronousStep(parts[0], passes=passes)
        return ThreadsStep(parts[0], others=parts[1:], mirror=request.mirror, turns=request.turns)

    def identity(self, plan: ExecutionPlan, piped: PipelineModel | None) -> str:
        """Return the rule: its results do not depend on the layout."""
        return str(plan.rule)

    def buffer_note(self, policy: str) -> str:
        """Return the line on the policy."""
        return buffer_notes(policy, is_race=False, has_sites=False)


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
    """Return the object that answers for the requested rule."""
    return STEP_RULES[update.kind]
