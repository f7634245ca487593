"""The memory case of a model: everything fits on one device, only single layers do, or a layer does not fit."""

from dataclasses import dataclass, replace

from paceline.console.formatting import format_size
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.cost.memory import Memory
from paceline.planner.model_costs.model_profile import LayerProfile
from paceline.planner.search.search_space import SearchSpace


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """The case number, 1, 2 or 3, and what it means for this model and this device."""

    number: int
    description: str


def find_memory_case(cost_model: CostModel, *, grid: SearchSpace | None = None) -> MemoryCase:
    """Return the case for the smallest microbatch, without activation checkpointing or offloading."""
    cluster, profile = cost_model.cluster, cost_model.profile
    limit, samples = cluster.device.memory_bytes, (grid or SearchSpace()).micro_batch_size or 1
    single_device = CostModel(
        profile=profile, cluster=replace(cluster, nodes=1, devices=1), efficiency=cost_model.efficiency
    )
    memory = single_device.memory(Candidate(micro_batch_size=samples, precision=profile.precision))
    device_text = f"a device ({cluster.device.name}) has {format_size(round(limit))}"
    if memory.peak_bytes <= limit:
        peak = format_size(round(memory.peak_bytes))
        description = f"model, training state and a microbatch fit on one device: {peak}, {device_text}."
        return MemoryCase(number=1, description=f"{description} More devices are for speed.")
    part, needed = max(_min_layer_bytes(single_device, samples), key=lambda pair: pair[1])
    if needed > limit:
        description = (
            f"{part.name} alone needs {format_size(round(needed))} and {device_text}: tensors must be split (tp, cp)."
        )
        return MemoryCase(number=3, description=description)
    return MemoryCase(
        number=2,
        description=f"{_state_text(memory, limit)}, {device_text}, but every layer fits: "
        "shard it (fsdp) or cut it (pp).",
    )


def _state_text(memory: Memory, limit: float) -> str:
    parameters, state = format_size(round(memory.parameters)), format_size(round(memory.state_bytes))
    total = format_size(round(memory.peak_bytes))
    if memory.parameters <= limit:
        needed = f"with their training state ({state}) and a microbatch it is {total}"
        return f"parameters ({parameters}) fit on one device, {needed}"
    return f"parameters ({parameters}) do not fit on one device, nor does their training state ({state})"


def _min_layer_bytes(single_device: CostModel, samples: int) -> list[tuple[LayerProfile, float]]:
    """Return each part with the least bytes that it needs: parameters, gradients and activations of one microbatch."""
    element_bytes = single_device.profile.element_bytes
    layer_costs = single_device.layer_costs(
        Candidate(micro_batch_size=samples, precision=single_device.profile.precision)
    )
    reserve = single_device.cluster.device.reserve_bytes
    return [
        (
            part,
            2 * element_bytes * part.parameters
            + work.kept_bytes
            + work.cast_bytes
            + work.recompute_bytes
            + work.transient_bytes
            + reserve,
        )
        for part, work in zip(single_device.chain.parts, layer_costs, strict=True)
    ]
