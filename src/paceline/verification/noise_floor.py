"""Noise floors: how far two correct results may differ, measured for each tensor.

One process repeats the same step a few times: with every weight perturbed by one unit in the last place, and once with
the microbatches in reverse order instead. A small change of the result is rounding, and gives the floor. A change
above a limit is not used, because it has another cause, such as a random number that differs in each run or a
dependence on the order. There is one exception: if the layout computes slices of a microbatch in half precision, a
perturbation of the weights may change the gradient by more than the limit, and this change is used too. A tensor whose
true gradient is zero gets a floor above the norm of its computed gradient, which is only rounding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.parallel.module_access.forward_counters import ModuleNumbers
from paceline.verification.reference.dropout_isolation import dropout_rates
from paceline.verification.reference.reference import Reference, ReferenceGradient, ReferenceMicrobatch, RunPosition
from paceline.verification.tensor_distance import euclidean_distance, euclidean_norm, machine_epsilon

MARGIN = 16.0  # the factor from the measured noise to the floor
# the same for half precision: with 8 or 11 bits, noise is a large share of a gradient, so a factor of 16 hides faults
_HALF_PRECISION_MARGIN = 4.0
# A change of the whole gradient is called rounding if it is at most a limit, relative to the gradient's norm. The limit
# is the smaller of the first two numbers, but at least the third one.
MAX_ROUNDING_EPS = 4096.0  # in machine epsilons
_MAX_ROUNDING_FRACTION = 0.02
_MIN_ROUNDING_EPS = 16.0  # in machine epsilons; in bfloat16 this is more than _MAX_ROUNDING_FRACTION
_OTHER_KERNELS_FACTOR = 16.0  # multiplies floors of gradients and buffers if `uses_other_kernels` is set
_NUM_PERTURBED_RUNS = 3
_MIN_FLOOR_EPS = 4.0  # the smallest floor, in machine epsilons of the tensor's norm and before the margin


@dataclass(frozen=True, kw_only=True)
class NoiseFloors:
    """The noise floors of one step: for each gradient and buffer, by name, a Euclidean distance; and one for the loss.

    `is_repeatable`: the same step from the same weights and buffers gives the same result. `is_order_independent`: the
    step gives the same result if its microbatches run in reverse order. `is_rounding_dominated`: rounding in
    half precision changes the gradient by more than the limit, so that rounding alone may explain any difference.
    """

    gradients: dict[str, float]
    buffers: dict[str, float]
    loss: float
    is_repeatable: bool = True
    is_order_independent: bool = True
    is_rounding_dominated: bool = False


class ModelSnapshot:
    """A copy of a model's weights, buffers and its modules' numeric attributes.

    A forward may change numeric attributes (it may count its calls), so a repeated step must start from the same
    values. Dropout rates are excluded, because `without_dropout` may have set them to zero.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.tensors = {name: t.detach().clone() for name, t in _named_tensors(model).items()}
        self._numbers = ModuleNumbers(model, ignored=_dropout_rate_names)

    def restore(self) -> None:
        """Restore the copied values in the model."""
        with torch.no_grad():
            for name, tensor in _named_tensors(self._model).items():
                tensor.copy_(self.tensors[name])
        self._numbers.restore()


def _dropout_rate_names(module: nn.Module) -> set[str]:
    return {name for name, _ in dropout_rates(module)}


def noise_margin(value: Tensor) -> float:
    """Return the factor between the measured noise of this tensor and its floor."""
    return _HALF_PRECISION_MARGIN if value.is_floating_point() and value.dtype.itemsize < 4 else MARGIN


def measure_floors(
    reference: Reference,
    gradient: ReferenceGradient,
    *,
    position: RunPosition,
    microbatches: Sequence[ReferenceMicrobatch],
    start: ModelSnapshot,
) -> NoiseFloors:
    """Return the noise floors of a step: the largest change over perturbed runs, times a margin.

    In exact mode, the floor of a gradient also covers the rounding to the integers of the fixed-point grid.

    `gradient` is the reference's gradient of this step, and `start` the model's state before the step.
    """
    state_after = ModelSnapshot(reference.model)
    start.restore()
    is_repeatable = is_rounding(gradient, reference.compute_gradient(position, microbatches=microbatches), reference)
    start.restore()
    reversed_order = reference.compute_gradient(position, microbatches=microbatches, reverse_order=True)
    is_order_independent = is_rounding(gradient, reversed_order, reference)
    rerun_gradients = [reversed_order] if is_order_independent else []
    buffers: list[dict[str, Tensor]] = []
    is_rounding_dominated = False
    for run in range(_NUM_PERTURBED_RUNS if is_repeatable else 0):
        start.restore()
        perturb_reference(reference, seed=run)
        perturbed = reference.compute_gradient(position, microbatches=microbatches)
        is_close = is_rounding(gradient, perturbed, reference)
        is_rounding_dominated = is_rounding_dominated or (has_half_precision_slices(reference) and not is_close)
        # otherwise a discrete decision flipped (round, argmax, top-k), and this run says nothing about rounding
        if is_close or is_rounding_dominated:
            rerun_gradients.append(perturbed)
            buffers.append({name: b.detach().clone() for name, b in reference.model.named_buffers()})
    state_after.restore()
    gradients = _measure_tensor_floors(gradient.total, [other.total for other in rerun_gradients if is_repeatable])
    for name, value in gradient.max_abs.items():
        grid_error = reference.config.grid_step * value * len(microbatches) * gradient.total[name].numel() ** 0.5
        gradients[name] = max(gradients[name], grid_error)
    buffer_floors = _measure_tensor_floors({name: b.detach() for name, b in reference.model.named_buffers()}, buffers)
    if reference.config.uses_other_kernels:
        gradients = {name: value * _OTHER_KERNELS_FACTOR for name, value in gradients.items()}
        buffer_floors = {name: value * _OTHER_KERNELS_FACTOR for name, value in buffer_floors.items()}
    losses = [abs(other.loss - gradient.loss) for other in rerun_gradients if is_repeatable]
    return NoiseFloors(
        gradients=gradients,
        buffers=buffer_floors,
        loss=MARGIN
        * max(*losses, 0.0, _MIN_FLOOR_EPS * machine_epsilon(next(iter(gradient.total.values()))) * abs(gradient.loss)),
        is_repeatable=is_repeatable,
        is_order_independent=is_order_independent,
        is_rounding_dominated=is_rounding_dominated,
    )


def is_rounding(gradient: ReferenceGradient, other: ReferenceGradient, reference: Reference) -> bool:
    """Return True if rounding alone can explain the distance of two gradients of the same weights and samples."""
    first = next(iter(gradient.total.values()), torch.zeros(()))
    eps = max(
        machine_epsilon(first), 0.0 if reference.config.autocast is None else torch.finfo(reference.config.autocast).eps
    )
    norm = math.hypot(*(euclidean_norm(value) for value in gradient.total.values()))
    distance = math.hypot(
        *(euclidean_distance(value, other.total.get(name, value * 0)) for name, value in gradient.total.items())
    )
    return not distance > max(min(MAX_ROUNDING_EPS * eps, _MAX_ROUNDING_FRACTION), _MIN_ROUNDING_EPS * eps) * norm


def perturb_weights(model: nn.Module, *, seed: int, min_step: float = 0.0) -> None:
    """Move every trained weight up or down by one unit in the last place, or by the fraction `min_step` if it is more.

    A weight below the root mean square of its tensor is moved as far as a weight of that size.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not machine_epsilon(parameter) or not parameter.numel() or not parameter.requires_grad:
                continue
            sign = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
            rms = euclidean_norm(parameter) / parameter.numel() ** 0.5
            parameter.add_(sign * parameter.abs().clamp(min=rms) * max(machine_epsilon(parameter), min_step))


def has_half_precision_slices(reference: Reference) -> bool:
    """Return True if a layout such as tp computes each microbatch in slices, and in half precision.

    The rounding of the slices is then so coarse that even a flipped decision (argmax, top-k) counts as rounding.
    """
    has_half_weights = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in reference.model.parameters())
    return reference.config.is_sliced and (has_half_weights or reference.config.autocast is not None)


def perturb_reference(reference: Reference, *, seed: int) -> None:
    """Perturb the reference's weights by one unit in the last place.

    If the layout computes slices of a microbatch under autocast, perturb by the epsilon of the autocast type.
    """
    autocast_dtype = reference.config.autocast if reference.config.is_sliced else None
    perturb_weights(
        reference.model, seed=seed, min_step=0.0 if autocast_dtype is None else torch.finfo(autocast_dtype).eps
    )


def can_perturb(reference: Reference, *, position: RunPosition, seed: int) -> bool:
    """Return True if perturbing the weights changes the gradient only by rounding; the reference is restored."""
    if has_half_precision_slices(reference):
        return True
    start = ModelSnapshot(reference.model)
    gradient = reference.compute_gradient(position)
    start.restore()
    perturb_reference(reference, seed=seed)
    perturbed = reference.compute_gradient(position)
    start.restore()
    return is_rounding(gradient, perturbed, reference)


def _measure_tensor_floors(expected: Mapping[str, Tensor], reruns: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    floors = {}
    for name, value in expected.items():
        distances = [euclidean_distance(value, other[name]) for other in reruns if name in other]
        floors[name] = noise_margin(value) * max(
            *distances, 0.0, _MIN_FLOOR_EPS * machine_epsilon(value) * euclidean_norm(value)
        )
    return floors


def _named_tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
