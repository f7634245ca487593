"""The Hogwild rule: workers update the same weights without locks."""

from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.comm.process_group import World
from paceline.parallel.data_parallel.module_buffers import buffer_notes
from paceline.parallel.data_parallel.shared_memory_model import SharedModel
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.step.shared_memory.hogwild import HogwildStep
from paceline.step.step_rule import RuleTraits, StepRequest
from paceline.step.synchronous import SynchronousStep


class HogwildRule:
    """The rule of `--update hogwild`."""

    traits = RuleTraits()

    def groups(self, worlds: MeshGroups, *, plan: ExecutionPlan) -> MeshGroups:
        """Return all groups: all workers have the same weights."""
        return worlds

    def share_model(self, model: nn.Module, *, world: World) -> SharedModel:
        """Put the weights into memory that all workers share."""
        return SharedModel(model, world=world)

    def make_step(self, request: StepRequest) -> SynchronousStep:
        """Return a worker's step."""
        assert request.shared is not None
        return HogwildStep(request.parts[0], shared=request.shared)

    def identity(self, plan: ExecutionPlan, piped: PipelineModel | None) -> str:
        """Return the rule: its results do not depend on the layout."""
        return str(plan.rule)

    def buffer_note(self, policy: str) -> str:
        """Return the line on the shared buffers."""
        return buffer_notes(policy, is_race=True, has_sites=False)
