"""Find the memory case of a model: everything fits on one device, only single layers fit, or a layer does not fit."""

from dataclasses import dataclass, replace

from paceline.console.formatting import format_size
from paceline.planner.cost.cost_model import CostModel
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.model_costs.model_profile import LayerProfile
from paceline.planner.search.search_space import SearchSpace


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """The memory case of a model on a device."""

    number: int
    """1: everything fits on one device. 2: only single layers fit. 3: a layer does not fit."""
    description: str
    """What the case means for this model and this device."""


def find_memory_case(cost_model: CostModel, *, grid: SearchSpace | None = None) -> MemoryCase:
    """Return the memory case for the smallest microbatch, without activation checkpointing or offloading."""
    cluster, profile = cost_model.cluster, cost_model.profile
    limit, samples = cluster.device.memory_bytes, (grid or SearchSpace()).micro_batch_size or 1
    single_device = CostModel(
        profile=profile, cluster=replace(cluster, nodes=1, devices=1), efficiency=cost_model.efficiency
    )
    memory = single_device.memory(Candidate(micro_batch_size=samples, precision=profile.precision))
    device_text, peak = f"{cluster.device.name}, {format_size(round(limit))}", format_size(round(memory.peak_bytes))
    if memory.peak_bytes <= limit:
        description = f"model, training state and a microbatch ({peak}) fit on one device ({device_text})."
        return MemoryCase(number=1, description=f"{description} More devices are for speed.")
    part, needed = max(_min_layer_bytes(single_device, samples), key=lambda pair: pair[1])
    if needed > limit:
        description = f"{part.name} alone needs {format_size(round(needed))}, more than one device ({device_text}) has."
        return MemoryCase(number=3, description=f"{description} Its tensors must be split (tp, cp).")
    fit = "fit" if memory.parameters <= limit else "do not fit"
    return MemoryCase(
        number=2,
        description=f"the parameters ({format_size(round(memory.parameters))}) {fit} on one device ({device_text}). "
        f"With training state ({format_size(round(memory.state_bytes))}) and a microbatch, {peak} are needed. "
        "Every layer fits alone: shard the model (fsdp) or cut it into stages (pp).",
    )


def _min_layer_bytes(single_device: CostModel, samples: int) -> list[tuple[LayerProfile, float]]:
    """Return the parts of the model, each with the least bytes that a device needs for it.

    The bytes are the sum of its parameters, gradients and activations for one microbatch, and the device's reserve.
    """
    element_bytes = single_device.profile.element_bytes
    layer_costs = single_device.layer_costs(
        Candidate(micro_batch_size=samples, precision=single_device.profile.precision)
    )
    reserve = single_device.cluster.device.reserve_bytes
    return [
        (
            part,
            2 * element_bytes * part.parameters
            + cost.kept_bytes
            + cost.cast_bytes
            + cost.recompute_bytes
            + cost.transient_bytes
            + reserve,
        )
        for part, cost in zip(single_device.chain.parts, layer_costs, strict=True)
    ]
