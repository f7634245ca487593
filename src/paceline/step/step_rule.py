"""The interface of an update rule: what the loop, the set-up, checkpoints and verify ask about it."""

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

    `reads_samples`: the ranks of the process group read the samples. `takes_sparse`: sparse gradients are possible.
    `divides_parameters`: a parameter may be divided over ranks, else each is one rank's. `spreads_updates`: each update
    is sent to the ranks that hold other parts. `measures_joint_norm`: the gradient norm is that of all ranks together.
    `verified`: how `verify` compares a run: step by step, or as two independent runs, or by a replay of what happened.
    """

    reads_samples: bool = True
    takes_sparse: bool = False
    divides_parameters: bool = True
    spreads_updates: bool = True
    measures_joint_norm: bool = True
    verified: Literal["stepwise", "freely", "replayed"] = "stepwise"


@dataclass(frozen=True, kw_only=True)
class StepRequest:
    """What a step is made from. `contexts` has one context for each replica of this process.

    `mirror` and `turns` are there if the replicas are threads, `shared` if processes share one model in memory.
    `replicas` is the world of this rank's counterparts in the other replicas.
    """

    plan: ExecutionPlan
    contexts: Sequence[ReplicaContext]
    placed: ParallelizedModel
    mirror: ThreadReplicas | None
    turns: HostRngTurns | None
    shared: SharedModel | None
    replicas: World


class StepRule(ABC):
    """The answers of one update rule. The defaults are those of the synchronous rule."""

    traits: ClassVar[RuleTraits] = RuleTraits()

    def refuse_job(self, job: Job, settings: Settings, plan: ExecutionPlan) -> Iterable[PacelineError]:
        """Return an error for each feature of the job that the rule cannot have."""
        return ()

    def is_gradient_worker(self, update: UpdateRule, *, rank: int) -> bool:
        """Return True if this rank only computes gradients, and joins no process group."""
        return False

    def join(self, plan: ExecutionPlan, *, place: LaunchInfo, timeout_seconds: float) -> World:
        """Join the other ranks. Every rank that is no gradient worker calls this once.

        Raises:
            MachineError: the ranks did not meet in time, or the device is missing.
        """
        return World.join(place=place, device_type=plan.device, backend=plan.backend, timeout_seconds=timeout_seconds)

    def plan_of_group(self, plan: ExecutionPlan, *, world_size: int) -> ExecutionPlan:
        """Return the plan that the ranks of the process group follow."""
        return plan

    def groups(self, worlds: MeshGroups, *, plan: ExecutionPlan) -> MeshGroups:
        """Return the groups of the ranks that have one set of weights in common. Every rank calls this."""
        return worlds

    def share_model(self, model: nn.Module, *, world: World) -> SharedModel | None:
        """Return the model in memory that all processes share, or None if each has its own."""
        return None

    @abstractmethod
    def make_step(self, request: StepRequest) -> SynchronousStep:
        """Return the step by which this process's replicas turn a batch into an update.

        Raises:
            LayoutError, JobError, Problems: the model has something that the rule does not support.
        """

    def identity(self, plan: ExecutionPlan, piped: PipelineModel | None) -> str:
        """Return the rule, with the properties of the layout that its results depend on, for a checkpoint."""
        return str(plan.update_rule)

    def buffer_note(self, policy: str) -> str:
        """Return a line for the user on how running statistics are combined."""
        return f"buffers: {policy}, {POLICIES[policy]}"
