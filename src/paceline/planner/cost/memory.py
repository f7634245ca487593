"""Estimate the peak memory of one rank. The peak occurs in backward or in the optimizer's update."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from operator import itemgetter

from paceline.planner.cost.activations import ActivationPeak
from paceline.planner.cost.layer_cost import compute_bytes
from paceline.planner.cost.layout_candidate import Candidate
from paceline.planner.hardware.cluster import Device
from paceline.planner.hardware.efficiency import Efficiency
from paceline.planner.layout.bucket_sizes import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    LARGE_PARAMETER_BYTES,
    TRANSIENT_BUCKET_BYTES,
)
from paceline.planner.model_costs.layer_chain import Chain, Counts
from paceline.planner.model_costs.model_profile import LayerProfile, ModelProfile

_LARGEST_TENSOR_FRACTION = 1 / 3  # the assumed fraction of a block's parameters in its largest tensor


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of one rank at its peak, by purpose. The field names are keys of plan.json."""

    parameters: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    master: float = 0.0
    """Float32 master weights. Always 0, because parameters keep their own type and matmuls use copies of them."""
    activations: float = 0.0
    """Saved activations, with the weight copies that matmuls use."""
    gathered: float = 0.0
    """Parameters that fsdp has gathered from their shards."""
    buffers: float = 0.0
    """Buckets and other memory of messages; a model's own buffers are part of `parameters`."""
    temporaries: float = 0.0
    """Tensors that live within one operation."""
    slack: float = 0.0
    """Memory that the allocator holds beyond what was requested."""
    reserve: float = 0.0
    """Memory that is not available to the model."""
    host_bytes: float = 0.0
    """Bytes of offloaded state on the host. They are not part of `peak_bytes`."""

    @property
    def peak_bytes(self) -> float:
        """The sum of all parts on the device."""
        state = self.parameters + self.gradients + self.optimizer + self.master
        return state + self.activations + self.gathered + self.buffers + self.temporaries + self.slack + self.reserve

    def scaled_by(self, factor: float) -> "Memory":
        """Return a copy with `factor` times the bytes, except the reserve; the additional bytes are counted as slack.

        A factor below 1 has no effect.
        """
        extra_bytes = max(0.0, factor - 1) * (self.peak_bytes - self.reserve)
        return replace(self, slack=self.slack + extra_bytes) if extra_bytes else self

    @property
    def state_bytes(self) -> float:
        """The bytes of the training state: parameters, gradients and optimizer state."""
        return self.parameters + self.gradients + self.optimizer + self.master

    @property
    def parts(self) -> dict[str, float]:
        """The bytes of each part, by name."""
        return {name: getattr(self, name) for name in MEMORY_PARTS}


MEMORY_PARTS = tuple(field.name for field in fields(Memory) if field.name != "host_bytes")


@dataclass(frozen=True, kw_only=True)
class Elements:
    """The numbers of parameter elements of a rank, before data parallelism shards them."""

    dense: float
    """The elements that ZeRO may shard; without ep, they include those of experts."""
    experts: float
    """The elements of experts if ep divides them; ZeRO never shards these. 0 without ep."""
    outside_blocks: float
    """The dense elements that are in no block."""
    largest_block: float
    """The dense elements of the largest block."""
    last_reduced: float
    """The elements whose gradients are ready last: those of the part before the blocks or, if more, of a block."""
    trained_fraction: float
    """The fraction of all elements that has gradients."""
    large: float
    """The elements of tensors that are sent without a bucket."""
    largest_block_tensor: float
    """The elements of the largest tensor inside a block."""
    largest_end_tensor: float
    """The elements of the largest tensor outside of blocks."""
    buffer_bytes: float
    """The bytes of the model's buffers."""

    @property
    def largest_tensor(self) -> float:
        """The elements of the largest tensor."""
        return max(self.largest_block_tensor, self.largest_end_tensor)


def count_elements(profile: ModelProfile, chain: Chain, counts: Counts, *, tp: int, ep: int) -> Elements:
    """Return the elements of these parts on one of `tp` × `ep` ranks.

    `counts` tells how often the rank holds each part of the chain. Parts 0 and 1 are those before and after the blocks.
    Weights that these two parts share (tied) count once.
    """
    rank_parameters = [part.rank_parameters(tp=tp, ep=ep) for part in chain.parts]
    tied_elements = (
        profile.tied / (tp if profile.last.split_parameters >= profile.tied else 1) if counts[0] and counts[1] else 0.0
    )
    parts = list(zip(counts, chain.parts, strict=True))
    total = sum(count * part.parameters for count, part in parts)
    frozen = sum(count * part.frozen_parameters for count, part in parts)
    largest_block = max(
        (size for count, size in zip(counts[2:], rank_parameters[2:], strict=True) if count), default=0.0
    )
    dense = sum(count * size for count, size in zip(counts, rank_parameters, strict=True)) - tied_elements
    outside_blocks = (
        sum(count * size for count, size in zip(counts[:2], rank_parameters[:2], strict=True)) - tied_elements
    )
    return Elements(
        dense=dense,
        experts=sum(count * part.expert_parameters / ep for count, part in parts) if ep > 1 else 0.0,
        outside_blocks=outside_blocks,
        largest_block=largest_block,
        last_reduced=min(dense, max(counts[0] * rank_parameters[0], largest_block)),
        trained_fraction=1 - frozen / total if total else 0.0,
        large=_unbucketed_elements(profile, parts, tp=tp),
        largest_block_tensor=max(
            (_largest_tensor_elements(part, _LARGEST_TENSOR_FRACTION) for count, part in parts[2:] if count),
            default=0.0,
        )
        / tp,
        largest_end_tensor=max((_largest_tensor_elements(part, 1.0) for count, part in parts[:2] if count), default=0.0)
        / tp,
        buffer_bytes=sum(count * part.buffer_bytes for count, part in parts),
    )


def _unbucketed_elements(profile: ModelProfile, parts: Sequence[tuple[int, LayerProfile]], *, tp: int) -> float:
    """Return the elements of tensors that are sent without a bucket.

    These are the large tensors, except the model's first tensor. The gradient of the first tensor always goes into a
    bucket, together with one flag for each parameter, which tells whether the parameter got a gradient. The model's
    last tensor is also sent without a bucket if it is at least as large as the small first bucket.
    """
    element_bytes, (first, last) = (
        profile.element_bytes / tp,
        (part.tensors if count else () for count, part in parts[:2]),
    )
    elements = 0.0
    for count, part in parts:
        large = (
            sum(n for n in part.tensors if element_bytes * n > LARGE_PARAMETER_BYTES)
            if part.tensors
            else part.large_parameters
        )
        elements += count * large / tp
    if first and element_bytes * first[0] > LARGE_PARAMETER_BYTES:
        elements -= first[0] / tp
    if last and FIRST_BUCKET_BYTES <= element_bytes * last[-1] <= LARGE_PARAMETER_BYTES:
        elements += last[-1] / tp
    return elements


def _largest_tensor_elements(part: LayerProfile, assumed_fraction: float) -> float:
    """Return the elements of the part's largest tensor, by default this fraction of the part's parameters."""
    return max(part.tensors, default=0) or assumed_fraction * part.parameters


def static_bytes(elements: Elements, candidate: Candidate, profile: ModelProfile) -> tuple[float, float, float]:
    """Return the bytes of parameters, gradients and optimizer state of a rank, wherever they are stored.

    The ZeRO stage decides which of the three are sharded (Rajbhandari et al., "ZeRO", 2020).
    """
    zero, shard_size, element_bytes = candidate.zero, candidate.dp_shard, profile.element_bytes
    rank_elements = [elements.dense / (shard_size if zero >= stage else 1) + elements.experts for stage in (3, 2, 1)]
    parameters, gradients, optimizer = rank_elements
    return (
        element_bytes * parameters,
        element_bytes * gradients * elements.trained_fraction,
        profile.optimizer.state_bytes * optimizer * elements.trained_fraction,
    )


def estimate_memory(
    candidate: Candidate,
    profile: ModelProfile,
    elements: Elements,
    activations: ActivationPeak,
    *,
    device: Device,
    efficiency: Efficiency,
) -> Memory:
    """Return the memory of a rank at its peak in a step."""
    parameters, gradients, optimizer = static_bytes(elements, candidate, profile)
    state = {"parameters": parameters + elements.buffer_bytes, "gradients": gradients, "optimizer": optimizer}
    host_bytes, is_offloaded = 0.0, "parameters" in candidate.offload
    if is_offloaded:
        host_bytes += parameters + gradients
        state |= {"parameters": elements.buffer_bytes, "gradients": 0.0}
    step_phase = _optimizer_step_phase(candidate, profile, elements, device)
    backward_phases = list(_backward_phases(candidate, profile, elements, activations, device))
    if "optimizer" in candidate.offload:
        host_bytes += optimizer
        state["optimizer"] = 0.0
        if not is_offloaded:
            step_phase["optimizer"] = optimizer  # moved to the device for the step
    if candidate.zero < 2 and activations.is_before_gradients:
        phases = [*({**phase, "gradients": 0.0} for phase in backward_phases[:-1]), backward_phases[-1]]
    else:
        phases = backward_phases
    reserve = device.reserve_bytes
    phase_peaks = [(_peak_bytes(state, phase, efficiency, reserve), phase) for phase in (*phases, step_phase)]
    fullest = max(phase_peaks, key=itemgetter(0))[1]
    return Memory(**(state | fullest), slack=_slack_bytes(fullest, efficiency), reserve=reserve, host_bytes=host_bytes)


def _optimizer_step_phase(
    candidate: Candidate, profile: ModelProfile, elements: Elements, device: Device
) -> dict[str, float]:
    """Return the bytes by purpose during the optimizer's update.

    With ZeRO stage 1 or 2, updated parameters are gathered two units at a time (see `_reduction_unit_bytes`).
    """
    transient_bytes = profile.optimizer.moment_bytes * elements.trained_fraction
    transient_bytes *= elements.dense / (candidate.dp_shard if candidate.zero else 1) + elements.experts
    phase = {"temporaries": transient_bytes * ("parameters" not in candidate.offload)}
    if candidate.zero in (1, 2):
        element_bytes = profile.element_bytes * elements.trained_fraction
        unit_bytes = _reduction_unit_bytes(
            elements.largest_tensor, element_bytes * elements.dense, element_bytes, device
        )
        phase["buffers"] = min(2 * unit_bytes, element_bytes * elements.dense) * (1 + 1 / candidate.dp_shard)
    return phase


def _backward_phases(
    candidate: Candidate, profile: ModelProfile, elements: Elements, peak: ActivationPeak, device: Device
) -> Iterator[dict[str, float]]:
    """Yield the bytes by purpose at the points of backward that may be the peak.

    These are the loss, the gradient of the part after the blocks, the backward of the last block, and the backward of
    the first block, when all gradients exist.
    """
    has_casts = candidate.params == "fp32"
    element_bytes, gradient_bytes = profile.element_bytes, profile.element_bytes * elements.trained_fraction
    gathered_element_bytes = compute_bytes("bf16") if candidate.params == "bf16" else element_bytes
    block_bytes = elements.largest_block * gathered_element_bytes * (candidate.zero == 3)
    root_bytes = elements.outside_blocks * gathered_element_bytes * (candidate.zero == 3)
    border_bytes = 2 * peak.border_bytes * (candidate.pp > 1)
    bucket_bytes = 0.0
    if candidate.zero < 2 and candidate.replicas * candidate.cp > 1:
        bucket_bytes = gradient_bytes * max(0.0, elements.dense + elements.experts - elements.large)
    pending_bytes = reduction_bytes = end_bytes = 0.0
    if candidate.zero >= 2:
        dense = gradient_bytes * elements.dense
        unit_bytes = _reduction_unit_bytes(
            elements.largest_block_tensor, dense - gradient_bytes * elements.outside_blocks, gradient_bytes, device
        )
        end_bytes = _reduction_unit_bytes(
            elements.largest_end_tensor, gradient_bytes * elements.outside_blocks, gradient_bytes, device
        )
        # two reductions are pending: gloo holds their inputs and copies until wait(), other backends only the results
        held_ratio = 1 / candidate.dp_shard if device.is_accelerator else 2 + 1 / candidate.dp_shard
        pending_bytes, reduction_bytes = (
            min(dense, end_bytes + unit_bytes) * held_ratio,
            min(dense, unit_bytes) * (1 + 2 * held_ratio),
        )
    cast_bytes = peak.cast_bytes * has_casts
    yield {
        "activations": peak.held_bytes + cast_bytes,
        "gathered": root_bytes + block_bytes,
        "buffers": bucket_bytes + pending_bytes + border_bytes,
        "temporaries": peak.tail_transient_bytes,
    }
    yield {
        "activations": peak.held_bytes + cast_bytes - peak.tail_bytes - peak.tail_cast_bytes * has_casts,
        "gathered": root_bytes + block_bytes,
        "buffers": bucket_bytes + pending_bytes + end_bytes + border_bytes,
        "temporaries": gradient_bytes * elements.largest_end_tensor,
    }
    recompute = peak.recompute_bytes + peak.recompute_cast_bytes * has_casts
    yield {
        "activations": peak.held_bytes + cast_bytes - peak.tail_bytes - peak.tail_cast_bytes * has_casts + recompute,
        # a pipeline also prefetches a unit for another microbatch
        "gathered": root_bytes + (2 + (candidate.pp > 1)) * block_bytes,
        "buffers": bucket_bytes + reduction_bytes + border_bytes,
        "temporaries": peak.transient_bytes,
    }
    yield {
        "activations": peak.end_bytes,
        "gathered": root_bytes + block_bytes,
        "buffers": reduction_bytes + border_bytes,
    }


def _reduction_unit_bytes(largest: float, total_bytes: float, element_bytes: float, device: Device) -> float:
    """Return the bytes of a unit: the gradients that one collective reduces, which are a large tensor or a full bucket.

    `largest` is the number of elements of the largest tensor. `total_bytes` are the bytes of all gradients that share
    these units: all of the rank's, those of its blocks, or those outside of its blocks.
    """
    if element_bytes * largest > LARGE_PARAMETER_BYTES:
        return element_bytes * largest
    return min(
        total_bytes, (BUCKET_BYTES if device.is_accelerator else TRANSIENT_BUCKET_BYTES) + element_bytes * largest / 2
    )


def _slack_bytes(phase: Mapping[str, float], efficiency: Efficiency) -> float:
    """Return the memory that the allocator holds beyond the transient memory of a phase."""
    transient = phase if "optimizer" not in phase else {n: size for n, size in phase.items() if n != "optimizer"}
    return efficiency.slack * sum(transient.values())


def _peak_bytes(
    state: Mapping[str, float], phase: Mapping[str, float], efficiency: Efficiency, reserve: float
) -> float:
    """Return the `Memory.peak_bytes` of a phase. The search calls this often, so no `Memory` is built."""
    phase_bytes = phase.get
    state_bytes = (
        state["parameters"]
        + phase_bytes("gradients", state["gradients"])
        + phase_bytes("optimizer", state["optimizer"])
    )
    total_bytes = (
        state_bytes
        + phase_bytes("activations", 0.0)
        + phase_bytes("gathered", 0.0)
        + phase_bytes("buffers", 0.0)
        + phase_bytes("temporaries", 0.0)
    )
    return total_bytes + _slack_bytes(phase, efficiency) + reserve
