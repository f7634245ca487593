"""Estimate the seconds of one optimizer step: the pipeline, exposed messages and the update."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from paceline.planner.cost.layer_cost import LayerCost, compute_bytes
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.memory import Elements, static_bytes
from paceline.planner.cost.pipeline_formulas import StageTimes, makespan
from paceline.planner.hardware.cluster import Device, Group, Link
from paceline.planner.hardware.efficiency import Efficiency
from paceline.planner.model_costs.layer_chain import Counts
from paceline.planner.model_costs.model_profile import ModelProfile


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """The seconds of one step on the busiest rank, by purpose. The field names are keys of plan.json.

    The fields add up to the step time. Messages count only with their exposed seconds, which compute does not hide.
    """

    compute: float = 0.0
    """Forward and backward, without recomputation and messages."""
    again: float = 0.0
    """Recomputation."""
    tensor: float = 0.0
    """Messages over tp."""
    context: float = 0.0
    """Messages over cp."""
    experts: float = 0.0
    """Messages over ep."""
    gather: float = 0.0
    """Messages of sharded parameters and gradients in every microbatch."""
    bubble: float = 0.0
    """Idle time in the pipeline."""
    gradients: float = 0.0
    """Gradient reduction at the end of the step."""
    update: float = 0.0
    """The optimizer's update."""
    offload: float = 0.0
    """Copies of offloaded state between device and host."""
    start: float = 0.0
    """The fixed cost of a step."""

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part, by name."""
        return {name: getattr(self, name) for name in STEP_TIME_PARTS}

    @property
    def step_seconds(self) -> float:
        """The sum of all parts."""
        once_per_step = self.gradients + self.update + self.offload + self.start
        return (
            self.compute
            + self.again
            + self.tensor
            + self.context
            + self.experts
            + self.gather
            + self.bubble
            + once_per_step
        )

    def scaled_by(self, factor: float) -> "StepTime":
        """Return a copy with every part multiplied by `factor`."""
        return StepTime(**{name: factor * value for name, value in self.parts.items()})

    @property
    def exposed(self) -> float:
        """The seconds of exposed messages."""
        return self.tensor + self.context + self.experts + self.gather + self.gradients


STEP_TIME_PARTS = tuple(part.name for part in fields(StepTime))


@dataclass(frozen=True, kw_only=True)
class CommGroups:
    """The groups of ranks that a rank communicates with, and its link to the host."""

    shard: Group
    """The ranks among which parameters, gradients or optimizer state are sharded."""
    shard_replicas: Group
    """The ranks that have equal shards."""
    data: Group
    """All ranks that reduce gradients together."""
    expert_replicas: Group
    """The ranks that have the same experts."""
    next_stage: Group
    """The ranks of one pipeline. Its `send` is a message to the next stage."""
    host: Link
    """The link to the host's memory."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The seconds of one stage for one microbatch. Exposed messages are those that compute does not hide."""

    forward: float
    """Forward, with its exposed messages."""
    backward_input: float
    """Backward for inputs, with the recomputation and all exposed messages of backward."""
    backward_weight: float
    """Backward for weights."""
    recompute: float = 0.0
    """Recomputation."""
    tensor: float = 0.0
    """Exposed messages over tp, in both directions."""
    context: float = 0.0
    """Exposed messages over cp, in both directions."""
    experts: float = 0.0
    """Exposed messages over ep, in both directions."""
    gather: float = 0.0
    """Exposed messages of sharded parameters and gradients, in both directions."""
    overlappable_seconds: tuple[float, float] = (0.0, 0.0)
    """Compute of (forward, backward) that can overlap data-parallel messages."""

    @property
    def seconds(self) -> float:
        """The seconds of forward and backward, with their messages."""
        return self.forward + self.backward_input + self.backward_weight


def build_stage(layer_costs: Sequence[LayerCost], counts: Counts) -> Stage:
    """Return the times of a stage whose parts occur `counts` times each, without data-parallel communication."""
    forward = messages_forward = backward = messages_backward = weight = recompute = tensor = context = experts = (
        overlappable_forward
    ) = overlappable_backward = 0.0
    for count, cost in zip(counts, layer_costs, strict=True):
        if count:
            forward, messages_forward = forward + count * cost.forward, messages_forward + count * cost.messages_forward
            backward, messages_backward = (
                backward + count * (cost.backward_input + cost.recompute),
                messages_backward + count * cost.messages_backward,
            )
            weight, recompute = weight + count * cost.backward_weight, recompute + count * cost.recompute
            tensor, context = tensor + count * cost.tensor, context + count * cost.context
            experts = experts + count * cost.experts
            overlappable_forward, overlappable_backward = (
                overlappable_forward + count * cost.overlappable_seconds[0],
                overlappable_backward + count * cost.overlappable_seconds[1],
            )
    return Stage(
        forward=forward + messages_forward,
        backward_input=backward + messages_backward,
        backward_weight=weight,
        recompute=recompute,
        tensor=tensor,
        context=context,
        experts=experts,
        overlappable_seconds=(overlappable_forward, overlappable_backward),
    )


def add_sharding_communication(
    stage: Stage, elements: Elements, *, units: int, candidate: Candidate, profile: ModelProfile, groups: CommGroups,
    efficiency: Efficiency,
) -> Stage:  # fmt: skip
    """Return the stage with the all-gathers and reduce-scatters of its `units` fsdp units for every microbatch.

    Messages overlap compute, except the all-gather for the first unit and the reduce-scatter of the last unit.
    Parameters outside of units are gathered before each forward and freed after its backward. In a pipeline, they are
    gathered once per step, which is not counted here.
    """
    if candidate.zero < 2:
        return stage
    hidden_seconds = [efficiency.overlap * seconds for seconds in stage.overlappable_seconds]
    shard, gradient_element_bytes = groups.shard, profile.element_bytes * elements.trained_fraction
    scatter, last_scatter = (
        shard.all_gather(gradient_element_bytes * elements.dense, calls=units),
        shard.all_gather(gradient_element_bytes * elements.last_reduced),
    )
    exposed_forward = backward_gather = first_gather = hook_seconds = 0.0
    if candidate.zero == 3:
        gathered_element_bytes = compute_bytes("bf16") if candidate.params == "bf16" else profile.element_bytes
        blocks = elements.dense - elements.outside_blocks
        first_gather = shard.all_gather(gathered_element_bytes * elements.largest_block)
        backward_gather = gather = shard.all_gather(gathered_element_bytes * blocks, calls=units)
        root_gather = shard.all_gather(gathered_element_bytes * elements.outside_blocks) if candidate.pp == 1 else 0.0
        hook_seconds = units * efficiency.unit_seconds
        if "parameters" in candidate.offload:
            host_bandwidth = groups.host.bytes_per_second * candidate.dp_shard
            gather, backward_gather = (
                gather + gathered_element_bytes * blocks / host_bandwidth,
                backward_gather + gathered_element_bytes * blocks / host_bandwidth,
            )
            scatter += gradient_element_bytes * elements.dense / host_bandwidth
        exposed_forward = hook_seconds + root_gather + max(first_gather, gather - hidden_seconds[0])
    exposed_backward = hook_seconds + max(first_gather + last_scatter, backward_gather + scatter - hidden_seconds[1])
    return Stage(
        **{
            **vars(stage),
            "forward": stage.forward + exposed_forward,
            "backward_input": stage.backward_input + exposed_backward,
            "gather": exposed_forward + exposed_backward,
        }
    )


def pipeline_seconds(candidate: Candidate, stages: Sequence[Stage], *, micro: int, hop: float) -> float:
    """Return the seconds from the first forward to the last backward of `micro` microbatches.

    `hop` is the time of a message to the next stage.
    """
    if len(stages) == 1:
        return micro * stages[0].seconds
    stage_times = StageTimes(
        forward=[stage.forward for stage in stages],
        backward_input=[stage.backward_input for stage in stages],
        backward_weight=[stage.backward_weight for stage in stages],
        hop_seconds=hop,
    )
    return makespan(candidate.schedule, stage_times, ranks=candidate.pp, micro=micro, virtual=candidate.virtual)


def build_step_time(
    candidate: Candidate, stages: Sequence[Stage], *, micro: int, hop: float, end_seconds: Mapping[str, float]
) -> StepTime:
    """Return the step time of these stages.

    `hop` is the time of a message to the next stage. `end_seconds` are the results of `estimate_step_end`.
    """
    total = pipeline_seconds(candidate, stages, micro=micro, hop=hop)
    busiest = _busiest_rank_stages(stages, schedule=candidate.schedule, ranks=candidate.pp)
    separate_seconds = {
        key: micro * sum(getattr(stage, name) for stage in busiest)
        for key, name in (
            ("again", "recompute"),
            *((kind, kind) for kind in ("tensor", "context", "experts", "gather")),
        )
    }
    busy_seconds = micro * sum(stage.seconds for stage in busiest)
    return StepTime(
        compute=busy_seconds - sum(separate_seconds.values()), bubble=total - busy_seconds, **separate_seconds,
        **end_seconds,
    )  # fmt: skip


def _busiest_rank_stages(stages: Sequence[Stage], *, schedule: str, ranks: int) -> Sequence[Stage]:
    """Return the stages of the rank with the most work."""
    stages_by_rank = [stages[rank::ranks] for rank in range(ranks)]
    if schedule == "zbv":
        stages_by_rank = [[stages[rank], stages[2 * ranks - 1 - rank]] for rank in range(ranks)]
    return max(stages_by_rank, key=lambda rank_stages: sum(stage.seconds for stage in rank_stages))


def estimate_step_end(
    candidate: Candidate, stage: Stage, elements: Elements, *, profile: ModelProfile, device: Device,
    groups: CommGroups, efficiency: Efficiency,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds of the work that a rank does once per step, by field of `StepTime`.

    `gradients` includes the all-gather of updated parameters with ZeRO stage 1 or 2.
    """
    element_bytes, trained, zero = profile.element_bytes, elements.trained_fraction, candidate.zero
    parameters, gradients, optimizer = static_bytes(elements, candidate, profile)
    reduce_seconds = _gradient_reduction_seconds(
        candidate, elements, element_bytes * trained, groups, efficiency.overlap * stage.overlappable_seconds[1]
    )
    if zero in (1, 2):
        reduce_seconds += groups.shard.all_gather(element_bytes * elements.dense)
    if profile.tied and candidate.pp > 1:
        reduce_seconds += 2 * groups.next_stage.send(
            element_bytes * profile.tied / candidate.tp
        )  # the first and the last stage each have a part of the tied weight's gradient
    rank_bytes = element_bytes * trained * (elements.dense / (candidate.dp_shard if zero else 1) + elements.experts)
    moved_bytes = 3 * rank_bytes + 2 * optimizer  # reads and writes state and parameters, reads gradients
    bandwidth = device.bytes_per_second * efficiency.memory
    host_bandwidth = groups.host.bytes_per_second
    offload = 2 * optimizer / host_bandwidth if "optimizer" in candidate.offload else 0.0
    if "parameters" in candidate.offload:
        offload = (parameters + gradients) / host_bandwidth
        bandwidth = min(bandwidth, efficiency.host * host_bandwidth)
    return {
        "gradients": reduce_seconds,
        "update": moved_bytes / bandwidth,
        "offload": offload,
        "start": efficiency.step_seconds,
    }


def _gradient_reduction_seconds(
    candidate: Candidate, elements: Elements, gradient_element_bytes: float, groups: CommGroups, hidden_seconds: float
) -> float:
    """Return the exposed seconds of gradient reduction at the end of a step.

    With ZeRO stage 0 or 1, the full gradients are all-reduced while the last backward runs, which can hide
    `hidden_seconds`. With stage 2 or 3, the gradients are reduce-scattered during backward, and
    `add_sharding_communication` counts that. The resulting shards are all-reduced over the replicas after the last
    backward. `gradient_element_bytes` is a mean over all elements; frozen elements have no gradient.
    """
    dense_bytes, seconds = gradient_element_bytes * elements.dense, 0.0
    if candidate.zero < 2:
        last_seconds = groups.data.all_reduce(gradient_element_bytes * elements.last_reduced)
        seconds = max(last_seconds, groups.data.all_reduce(dense_bytes) - hidden_seconds)
    else:
        seconds = groups.shard_replicas.all_reduce(dense_bytes / candidate.dp_shard)
    if candidate.zero == 3 and candidate.pp > 1:
        seconds += groups.shard.all_gather(gradient_element_bytes * elements.outside_blocks)
    if elements.experts:
        seconds += groups.expert_replicas.all_reduce(gradient_element_bytes * elements.experts)
    return seconds
