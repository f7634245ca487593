"""Seconds of one optimizer step: the pipeline's program, exposed messages and the update."""

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
    """The seconds of one step on the busiest rank, by purpose; the fields add up to the step.

    `tensor`, `context`, `experts`, `gather` and `gradients` are exposed messages: over tp, cp and ep, of sharded
    parameters and reduced gradients in every microbatch, and at the end of the step. `bubble` is the wait in the
    pipeline.
    """

    compute: float = 0.0
    again: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    gather: float = 0.0
    bubble: float = 0.0
    gradients: float = 0.0
    update: float = 0.0
    offload: float = 0.0
    start: float = 0.0

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part, by name."""
        return {name: getattr(self, name) for name in SPENT}

    @property
    def step_seconds(self) -> float:
        """The sum of all parts."""
        once = self.gradients + self.update + self.offload + self.start
        return self.compute + self.again + self.tensor + self.context + self.experts + self.gather + self.bubble + once

    def times(self, factor: float) -> "StepTime":
        """Return a copy with every part multiplied by `factor`."""
        return StepTime(**{name: factor * value for name, value in self.parts.items()})

    @property
    def exposed(self) -> float:
        """The seconds of exposed messages."""
        return self.tensor + self.context + self.experts + self.gather + self.gradients


SPENT = tuple(part.name for part in fields(StepTime))


@dataclass(frozen=True, kw_only=True)
class CommGroups:
    """The groups a rank communicates with.

    `shard` holds the shards of its replica, `rows` the ranks with the same shard, `data` all ranks that reduce
    gradients together, `twins` those with the same experts. `stage` is the next stage; `host` is the link to the host's
    memory.
    """

    shard: Group
    rows: Group
    data: Group
    twins: Group
    stage: Group
    host: Link


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The seconds of one stage for one microbatch; `again` and the messages are part of `forward` and `input`.

    `hides` is the forward and backward compute that can overlap data-parallel messages.
    """

    forward: float
    input: float
    weight: float
    again: float = 0.0
    tensor: float = 0.0
    context: float = 0.0
    experts: float = 0.0
    gather: float = 0.0
    hides: tuple[float, float] = (0.0, 0.0)

    @property
    def seconds(self) -> float:
        """The seconds of forward and backward."""
        return self.forward + self.input + self.weight


def stage_of(works: Sequence[LayerCost], counts: Counts) -> Stage:
    """Return the seconds of a stage, without data-parallel communication."""
    forward = out = back = returned = weight = again = tensor = context = experts = ahead = behind = 0.0
    for count, work in zip(counts, works, strict=True):
        if count:
            forward, out = forward + count * work.forward, out + count * work.messages_forward
            back, returned = back + count * (work.input + work.again), returned + count * work.messages_backward
            weight, again = weight + count * work.weight, again + count * work.again
            tensor, context = tensor + count * work.tensor, context + count * work.context
            experts = experts + count * work.experts
            ahead, behind = ahead + count * work.hides[0], behind + count * work.hides[1]
    return Stage(
        forward=forward + out,
        input=back + returned,
        weight=weight,
        again=again,
        tensor=tensor,
        context=context,
        experts=experts,
        hides=(ahead, behind),
    )


def with_sharding_communication(
    stage: Stage, elements: Elements, *, units: int, candidate: Candidate, facts: ModelProfile, groups: CommGroups,
    efficiency: Efficiency,
) -> Stage:  # fmt: skip
    """Return the stage with the all-gathers and reduce-scatters of every microbatch.

    Messages overlap compute, except the all-gather that the first unit waits for and the reduction of the last.
    Parameters outside of units are gathered before the forward and kept until the backward ends; in a pipeline, once a
    step.
    """
    if candidate.zero < 2:
        return stage
    hidden = [efficiency.overlap * seconds for seconds in stage.hides]
    shard, scattered = groups.shard, facts.element_bytes * elements.trained
    scatter, last = (
        shard.all_gather(scattered * elements.dense, calls=units),
        shard.all_gather(scattered * elements.end),
    )
    out = again = first = hooks = 0.0
    if candidate.zero == 3:
        each = compute_bytes("bf16") if candidate.params == "bf16" else facts.element_bytes
        blocks = elements.dense - elements.ends
        first = shard.all_gather(each * elements.block)
        again = gather = shard.all_gather(each * blocks, calls=units)
        root = shard.all_gather(each * elements.ends) if candidate.pp == 1 else 0.0
        hooks = units * efficiency.unit_seconds
        if "parameters" in candidate.offload:
            way = groups.host.bytes_per_second * candidate.dp_shard
            gather, again = gather + each * blocks / way, again + each * blocks / way
            scatter += scattered * elements.dense / way
        out = hooks + root + max(first, gather - hidden[0])
    back = hooks + max(first + last, again + scatter - hidden[1])
    return Stage(**{**vars(stage), "forward": stage.forward + out, "input": stage.input + back, "gather": out + back})


def pipeline_seconds(candidate: Candidate, stages: Sequence[Stage], *, micro: int, hop: float) -> float:
    """Return the seconds from the first forward to the last backward; without a pipeline, of the one stage."""
    if len(stages) == 1:
        return micro * stages[0].seconds
    turns = StageTimes(
        forward=[stage.forward for stage in stages],
        input=[stage.input for stage in stages],
        weight=[stage.weight for stage in stages],
        hop=hop,
    )
    return makespan(candidate.schedule, turns, ranks=candidate.pp, micro=micro, virtual=candidate.virtual)


def seconds_of(
    candidate: Candidate, stages: Sequence[Stage], *, micro: int, hop: float, end: Mapping[str, float]
) -> StepTime:
    """Return the step time of these stages, plus the seconds of the work at the step's `end`."""
    total = pipeline_seconds(candidate, stages, micro=micro, hop=hop)
    own = _busiest(stages, schedule=candidate.schedule, ranks=candidate.pp)
    found = {
        name: micro * sum(getattr(stage, name) for stage in own)
        for name in ("again", "tensor", "context", "experts", "gather")
    }
    busy = micro * sum(stage.seconds for stage in own)
    return StepTime(compute=busy - sum(found.values()), bubble=total - busy, **found, **end)


def _busiest(stages: Sequence[Stage], *, schedule: str, ranks: int) -> Sequence[Stage]:
    """Return the stages of the rank with the most work."""
    owned = [stages[rank::ranks] for rank in range(ranks)]
    if schedule == "zbv":
        owned = [[stages[rank], stages[2 * ranks - 1 - rank]] for rank in range(ranks)]
    return max(owned, key=lambda own: sum(stage.seconds for stage in own))


def end_of(
    candidate: Candidate, stage: Stage, elements: Elements, *, facts: ModelProfile, device: Device, groups: CommGroups,
    efficiency: Efficiency,
) -> dict[str, float]:  # fmt: skip
    """Return the seconds of what runs once a step: gradient reduction, update, all-gather of parameters, offload."""
    each, trained, zero = facts.element_bytes, elements.trained, candidate.zero
    parameters, gradients, optimizer = static_bytes(elements, candidate, facts)
    sums = _sums(candidate, elements, each * trained, groups, efficiency.overlap * stage.hides[1])
    if zero in (1, 2):
        sums += groups.shard.all_gather(each * elements.dense)
    if facts.tied and candidate.pp > 1:
        sums += 2 * groups.stage.pass_on(each * facts.tied / candidate.tp)  # both ends hold part of its gradient
    own = each * trained * (elements.dense / (candidate.dp_shard if zero else 1) + elements.experts)
    moved = 3 * own + 2 * optimizer
    bandwidth = device.bytes_per_second * efficiency.memory
    host = groups.host.bytes_per_second
    offload = 2 * optimizer / host if "optimizer" in candidate.offload else 0.0
    if "parameters" in candidate.offload:
        offload = (parameters + gradients) / host
        bandwidth = min(bandwidth, efficiency.host * host)
    return {"gradients": sums, "update": moved / bandwidth, "offload": offload, "start": efficiency.step_seconds}


def _sums(candidate: Candidate, elements: Elements, each: float, groups: CommGroups, hidden: float) -> float:
    """Return the exposed seconds of gradient reduction.

    Whole gradients are reduced while the last backward runs, sharded ones after it.
    """
    dense, sums = each * elements.dense, 0.0
    if candidate.zero < 2:
        tail = groups.data.all_reduce(each * elements.end)
        sums = max(tail, groups.data.all_reduce(dense) - hidden)
    else:
        sums = groups.rows.all_reduce(dense / candidate.dp_shard)
    if candidate.zero == 3 and candidate.pp > 1:
        sums += groups.shard.all_gather(each * elements.ends)
    if elements.experts:
        sums += groups.twins.all_reduce(each * elements.experts)
    return sums
