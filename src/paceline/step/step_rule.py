"""The interface of an update rule, for the loop, the set-up, checkpoints and verify."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from paceline.comm.mesh_groups import MeshGroups
from paceline.comm.process_group import LaunchInfo, World
from paceline.config.settings import Settings
from paceline.config.update_rule import UpdateRule
from paceline.errors import PacelineError
from paceline.job import Job
from paceline.parallel.data_parallel.module_buffers import POLICIES
from paceline.parallel.data_parallel.shared_memory_model import SharedModel
from paceline.parallel.data_parallel.thread_replicas import ThreadReplicas
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.parallel.placement import ParallelizedModel
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.step.replica_context import ReplicaContext
from paceline.step.shared_memory.rng_turns import HostRngTurns
from paceline.step.synchronous import SynchronousStep


@dataclass(frozen=True, kw_only=True)
class RuleTraits:
    """The properties of an update rule. The defaults are those of the synchronous rule.

    `reads_samples`: the ranks of the process group read the samples. `accepts_sparse_gradients`: gradients may be
    sparse. `splits_parameters`: a parameter may be sharded over ranks; otherwise one rank has all of it.
    `sends_updates`: after each update, the rank that updated a parameter sends the new values to the other ranks.
    `measures_joint_norm`: the gradient norm is computed over all ranks.

    `verify_mode` is how `verify` compares a run: step by step ("stepwise"), as two independent runs ("freely"), or by
    a replay of the recorded updates ("replayed").
    """

    reads_samples: bool = True
    accepts_sparse_gradients: bool = False
    splits_parameters: bool = True
    sends_updates: bool = True
    measures_joint_norm: bool = True
    verify_mode: Literal["stepwise", "freely", "replayed"] = "stepwise"


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """The components that a step is built from. `contexts` has one context for each replica of this process.

    `thread_replicas` and `rng_turns` are set if the replicas are threads. `shared_model` is set if processes share one
    model in memory. `replica_world` has one rank of each replica: the rank at this rank's position.
    """

    plan: ExecutionPlan
    contexts: Sequence[ReplicaContext]
    parallelized_model: ParallelizedModel
    thread_replicas: ThreadReplicas | None
    rng_turns: HostRngTurns | None
    shared_model: SharedModel | None
    replica_world: World


class StepRule(ABC):
    """The behavior of one update rule. The defaults are those of the synchronous rule."""

    traits: ClassVar[RuleTraits] = RuleTraits()

    def refuse_job(self, job: Job, settings: Settings, plan: ExecutionPlan) -> Iterable[PacelineError]:
        """Return an error for each feature of the job that the rule does not support."""
        return ()

    def is_gradient_worker(self, update: UpdateRule, *, rank: int) -> bool:
        """Return True if this rank only computes gradients and joins no process group."""
        return False

    def join(self, plan: ExecutionPlan, *, launch_info: LaunchInfo, timeout_seconds: float) -> World:
        """Join the other ranks. Every rank that is not a gradient worker calls this once.

        Raises:
            MachineError: a rank did not join in time, or the device is missing.
        """
        return World.join(
            launch_info=launch_info, device_type=plan.device, backend=plan.backend, timeout_seconds=timeout_seconds
        )

    def plan_for_group(self, plan: ExecutionPlan, *, world_size: int) -> ExecutionPlan:
        """Return the plan that the ranks of the process group follow."""
        return plan

    def groups(self, worlds: MeshGroups, *, plan: ExecutionPlan) -> MeshGroups:
        """Return the groups of the ranks that train the same weights. Every rank calls this."""
        return worlds

    def share_model(self, model: nn.Module, *, world: World) -> SharedModel | None:
        """Return the model in memory that all processes share, or None if each process has its own."""
        return None

    @abstractmethod
    def make_step(self, request: StepRequest) -> SynchronousStep:
        """Return the step of this process's replicas.

        Raises:
            LayoutError, JobError, Problems: the model has a feature that the rule does not support.
        """

    def identity(self, plan: ExecutionPlan, pipeline_model: PipelineModel | None) -> str:
        """Return a text for the checkpoint: the rule, and those properties of the layout that change its results."""
        return str(plan.update_rule)

    def buffer_note(self, policy: str) -> str:
        """Return a line for the user on how running statistics are combined."""
        return f"buffers: {policy}, {POLICIES[policy]}"
