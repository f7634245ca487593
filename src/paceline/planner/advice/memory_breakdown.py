"""The memory case of a model: all fits on one device, all but the training state does, or a layer does not."""

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
    says: str


def case_of(forecast: CostModel, *, grid: SearchSpace | None = None) -> MemoryCase:
    """Return the case for the smallest microbatch, without activation checkpointing or offloading."""
    fleet, facts = forecast.fleet, forecast.facts
    limit, samples = fleet.device.memory_bytes, (grid or SearchSpace()).micro_batch_size or 1
    alone = CostModel(facts=facts, fleet=replace(fleet, nodes=1, devices=1), efficiency=forecast.efficiency)
    whole = alone.memory(Candidate(micro_batch_size=samples, precision=facts.precision))
    named = f"a device ({fleet.device.name}) has {format_size(round(limit))}"
    if whole.peak_bytes <= limit:
        peak = format_size(round(whole.peak_bytes))
        says = f"model, training state and a microbatch fit on one device: {peak}, {named}."
        return MemoryCase(number=1, says=f"{says} More devices are for speed.")
    part, needed = max(_layers(alone, samples), key=lambda pair: pair[1])
    if needed > limit:
        says = f"{part.name} alone needs {format_size(round(needed))} and {named}: tensors must be split (tp, cp)."
        return MemoryCase(number=3, says=says)
    return MemoryCase(
        number=2, says=f"{_state(whole, limit)}, {named}, but every layer fits: shard it (fsdp) or cut it (pp)."
    )


def _state(whole: Memory, limit: float) -> str:
    parameters, state = format_size(round(whole.parameters)), format_size(round(whole.state_bytes))
    total = format_size(round(whole.peak_bytes))
    if whole.parameters <= limit:
        needed = f"with their training state ({state}) and a microbatch it is {total}"
        return f"parameters ({parameters}) fit on one device, {needed}"
    return f"parameters ({parameters}) do not fit on one device, nor does their training state ({state})"


def _layers(alone: CostModel, samples: int) -> list[tuple[LayerProfile, float]]:
    """Return each part with the least bytes it needs: gathered, with gradients and one microbatch's activations."""
    each = alone.facts.element_bytes
    works = alone.works(Candidate(micro_batch_size=samples, precision=alone.facts.precision))
    reserve = alone.fleet.device.reserve_bytes
    return [
        (
            part,
            2 * each * part.parameters
            + work.kept_bytes
            + work.cast_bytes
            + work.again_bytes
            + work.moment_bytes
            + reserve,
        )
        for part, work in zip(alone.chain.parts, works, strict=True)
    ]
