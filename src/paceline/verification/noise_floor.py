"""Noise floors: how far two correct results may differ, measured for each tensor.

One process computes the same step again with every weight moved by one unit in the last place, and with the
microbatches added in reverse. Whatever changes is rounding; a tensor whose true gradient is zero gets its own
floor, far above its size. A job that gives another result although nothing was moved has no floor: that is not
rounding, and neither is a result that depends on the order of the microbatches.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.parallel.module_access.forward_counters import ModuleNumbers
from paceline.verification.reference.dropout_isolation import dropout_rates
from paceline.verification.reference.reference import Gradient, Micro, Reference, RunPosition
from paceline.verification.tensor_distance import eps_of, euclidean_distance, euclidean_norm

MARGIN = 16.0
_MARGIN_OF_HALF = 4.0  # with 8 or 11 bits the noise is a large share of a gradient: 16 times it would hide faults
MOST_ROUNDING = 4096.0
_MOST_SHARE = 0.02
_LEAST_UNITS = 16.0  # for bfloat16 this exceeds _MOST_SHARE
_OTHER_ARITHMETIC = 16.0
_RUNS = 3
_ULPS = 4.0


@dataclass(frozen=True, kw_only=True)
class NoiseFloors:
    """The rounding of one step: Euclidean norms by tensor name, and that of the loss.

    `repeats`: the same step from the same weights and buffers gives the same result. `any_order`: so does the reverse
    order. `blurred`: in half precision, rounding alone changes the gradient beyond recognition.
    """

    gradients: dict[str, float]
    buffers: dict[str, float]
    loss: float
    repeats: bool = True
    any_order: bool = True
    blurred: bool = False


class ModelSnapshot:
    """A copy of a model's weights, buffers and its modules' numeric attributes.

    A forward may change a momentum or count its calls, so a step that is run again starts from the same numbers.
    Dropout rates are excluded, because they may be set to zero for a while.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.tensors = {name: t.detach().clone() for name, t in _tensors(model).items()}
        self._numbers = ModuleNumbers(model, but=_rates)

    def put_back(self) -> None:
        """Restore the copied values in the model."""
        with torch.no_grad():
            for name, tensor in _tensors(self._model).items():
                tensor.copy_(self.tensors[name])
        self._numbers.put_back()


def _rates(module: nn.Module) -> set[str]:
    return {name for name, _ in dropout_rates(module)}


def margin_of(value: Tensor) -> float:
    """Return the factor by which the measured noise is multiplied to give the floor."""
    return _MARGIN_OF_HALF if value.is_floating_point() and value.dtype.itemsize < 4 else MARGIN


def measure_floors(
    reference: Reference, gradient: Gradient, *, at: RunPosition, pieces: Sequence[Micro], start: ModelSnapshot
) -> NoiseFloors:
    """Return the largest change over disturbed runs, with a margin; `start` is the state before the step."""
    ended = ModelSnapshot(reference.model)
    start.put_back()
    repeats = is_rounding(gradient, reference.gradient(at, pieces=pieces), reference)
    start.put_back()
    turned = reference.gradient(at, pieces=pieces, backwards=True)
    any_order = is_rounding(gradient, turned, reference)
    others = [turned] if any_order else []
    buffers: list[dict[str, Tensor]] = []
    blurred = False
    for run in range(_RUNS if repeats else 0):
        start.put_back()
        disturb_reference(reference, seed=run)
        moved = reference.gradient(at, pieces=pieces)
        is_like = is_rounding(gradient, moved, reference)
        blurred = blurred or (is_coarse(reference) and not is_like)
        if is_like or blurred:  # otherwise a discrete decision flipped (round, argmax, top-k), which is not rounding
            others.append(moved)
            buffers.append({name: b.detach().clone() for name, b in reference.model.named_buffers()})
    ended.put_back()
    gradients = _floors(gradient.total, [other.total for other in others if repeats])
    for name, value in gradient.largest.items():
        step = reference.spec.grid * value * len(pieces) * gradient.total[name].numel() ** 0.5
        gradients[name] = max(gradients[name], step)
    kept = _floors({name: b.detach() for name, b in reference.model.named_buffers()}, buffers)
    if reference.spec.own_kernels:
        gradients = {name: value * _OTHER_ARITHMETIC for name, value in gradients.items()}
        kept = {name: value * _OTHER_ARITHMETIC for name, value in kept.items()}
    losses = [abs(other.loss - gradient.loss) for other in others if repeats]
    return NoiseFloors(
        gradients=gradients,
        buffers=kept,
        loss=MARGIN * max(*losses, 0.0, _ULPS * eps_of(next(iter(gradient.total.values()))) * abs(gradient.loss)),
        repeats=repeats,
        any_order=any_order,
        blurred=blurred,
    )


def is_rounding(one: Gradient, other: Gradient, reference: Reference) -> bool:
    """Return True if arithmetic alone can explain the distance of two gradients of the same weights and samples."""
    first = next(iter(one.total.values()), torch.zeros(()))
    eps = max(eps_of(first), 0.0 if reference.spec.autocast is None else torch.finfo(reference.spec.autocast).eps)
    whole = math.hypot(*(euclidean_norm(value) for value in one.total.values()))
    apart = math.hypot(
        *(euclidean_distance(value, other.total.get(name, value * 0)) for name, value in one.total.items())
    )
    return not apart > max(min(MOST_ROUNDING * eps, _MOST_SHARE), _LEAST_UNITS * eps) * whole


def nudge_weights(model: nn.Module, *, seed: int, least: float = 0.0) -> None:
    """Move every trained weight by one unit in the last place, up or down, or by `least` of its size.

    A small weight is moved relative to its tensor's root mean square.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not eps_of(parameter) or not parameter.numel() or not parameter.requires_grad:
                continue
            sign = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
            usual = euclidean_norm(parameter) / parameter.numel() ** 0.5
            parameter.add_(sign * parameter.abs().clamp(min=usual) * max(eps_of(parameter), least))


def is_coarse(reference: Reference) -> bool:
    """Return True if slices are computed in half precision, where a flipped discrete decision counts as rounding."""
    halves = any(p.is_floating_point() and p.dtype.itemsize < 4 for p in reference.model.parameters())
    return reference.spec.is_cut and (halves or reference.spec.autocast is not None)


def disturb_reference(reference: Reference, *, seed: int) -> None:
    """Move the reference's weights, by the autocast type's epsilon if slices of a product are each rounded to it."""
    kind = reference.spec.autocast if reference.spec.is_cut else None
    nudge_weights(reference.model, seed=seed, least=0.0 if kind is None else torch.finfo(kind).eps)


def can_disturb(reference: Reference, *, at: RunPosition, seed: int) -> bool:
    """Return True if disturbing the weights changes the gradient only by rounding; restore the reference afterwards."""
    if is_coarse(reference):
        return True
    start = ModelSnapshot(reference.model)
    one = reference.gradient(at)
    start.put_back()
    disturb_reference(reference, seed=seed)
    other = reference.gradient(at)
    start.put_back()
    return is_rounding(one, other, reference)


def _floors(right: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    found = {}
    for name, value in right.items():
        moved = [euclidean_distance(value, other[name]) for other in others if name in other]
        found[name] = margin_of(value) * max(*moved, 0.0, _ULPS * eps_of(value) * euclidean_norm(value))
    return found


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
