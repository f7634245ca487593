"""The rules of local SGD and DiLoCo: sites train on their own and synchronise every few steps."""

from collections.abc import Iterator
from dataclasses import replace

from typing_extensions import override

from paceline.bytes_sent import Traffic
from paceline.comm.mesh_groups import MeshGroups
from paceline.config.settings import Settings
from paceline.console.formatting import plural
from paceline.errors import JobError, PacelineError
from paceline.job import Job
from paceline.parallel.data_parallel.module_buffers import POLICIES
from paceline.parallel.pipeline.pipeline_model import PipelineModel
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.step.local_sgd.local_sgd_step import LocalStep
from paceline.step.local_sgd.site_synchronizer import SiteSynchronizer
from paceline.step.pipeline.pipeline_forward_backward import PipelineForwardBackward
from paceline.step.step_rule import RuleTraits, StepRequest, StepRule
from paceline.step.synchronous import SynchronousStep


class LocalSgdRule(StepRule):
    """The rules of `--update local` and `--update diloco`."""

    traits = RuleTraits(verify_mode="freely")

    @override
    def refuse_job(self, job: Job, settings: Settings, plan: ExecutionPlan) -> Iterator[PacelineError]:
        """Yield an error for each feature of the job that the rule does not support."""
        if job.ema is not None:
            yield JobError(
                f"ema= with --update {plan.update_rule.kind}: each site would have an average of its own.",
                cause="evaluations and checkpoints use the mean of the sites' weights",
                hint="ema=None",
            )
        if job.loss_over == "batch":
            yield JobError(
                f'loss_over="batch" with --update {plan.update_rule.kind}: no site ever has the whole batch.',
                cause="sites don't wait for each other's outputs",
                hint="--update sync",
            )

    @override
    def groups(self, worlds: MeshGroups, *, plan: ExecutionPlan) -> MeshGroups:
        """Return the groups of this rank's site."""
        return MeshGroups.for_local_sgd_site(worlds.all_ranks, mesh=plan.mesh)

    @override
    def make_step(self, request: StepRequest) -> SynchronousStep:
        """Return the step of this rank's site, with the object that synchronises the sites."""
        plan, replica, parallelized, site_peers = (
            request.plan,
            request.contexts[0],
            request.parallelized_model,
            request.replica_world,
        )
        forward_backward = (
            None
            if parallelized.pipeline_model is None
            else PipelineForwardBackward(replica, pipeline_model=parallelized.pipeline_model)
        )
        site_synchronizer = SiteSynchronizer(
            rule=plan.update_rule,
            named_parameters=parallelized.named_parameters,
            tensors=parallelized.weights,
            peers=replace(site_peers, traffic=Traffic()),
            sync_after_update=parallelized.sync_after_update,
            on_write=replica.buffers.accept_current_values,
        )
        return LocalStep(
            replica,
            site_synchronizer=site_synchronizer,
            first_microbatch=site_peers.rank * plan.mesh.dp_shard,
            forward_backward=forward_backward,
        )

    @override
    def identity(self, plan: ExecutionPlan, pipeline_model: PipelineModel | None) -> str:
        """Return the rule and the number of sites."""
        return f"{plan.update_rule} of {plural(plan.mesh.dp_replicate, 'site')}"

    @override
    def buffer_note(self, policy: str) -> str:
        """Return a line for the user on the buffer policy within a site and the average over sites."""
        return f"buffers: {policy} within a site ({POLICIES[policy]}), averaged over the sites at each synchronisation"
