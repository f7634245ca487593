"""How far two right answers may be apart: a floor per tensor, measured and not assumed.

One process computes the same step again with every weight moved by one unit in the last place, and with the
microbatches added in reverse. What moves by that is rounding; a tensor whose true gradient is zero has its own
floor, far above its size. A job that gives something else when nothing was moved at all has no floor: that is no
rounding, and neither is what depends on the order of the microbatches.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.prove.reference import At, Gradient, Micro, Reference

MARGIN = 16.0
MOST_ROUNDING = 4096.0
_MOST_SHARE = 0.02
_OTHER_ARITHMETIC = 16.0
_RUNS = 3
_ULPS = 4.0


@dataclass(frozen=True, kw_only=True)
class Floors:
    """What is rounding in one step: Euclidean norms by name, and of the loss.

    `repeats`: the same step from the same weights and buffers gives the same again. `any_order`: also backwards.
    """

    gradients: dict[str, float]
    buffers: dict[str, float]
    loss: float
    repeats: bool = True
    any_order: bool = True


class Kept:
    """A model's weights and buffers at one moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.tensors = {name: t.detach().clone() for name, t in _tensors(model).items()}

    def put_back(self) -> None:
        """Give them back to the model."""
        with torch.no_grad():
            for name, tensor in _tensors(self._model).items():
                tensor.copy_(self.tensors[name])


def floors(reference: Reference, gradient: Gradient, *, at: At, pieces: Sequence[Micro], start: Kept) -> Floors:
    """The largest change over disturbed runs, with a margin; `start` is the state before the step."""
    ended = Kept(reference.model)
    start.put_back()
    repeats = is_rounding(gradient, reference.gradient(at, pieces=pieces), reference)
    start.put_back()
    turned = reference.gradient(at, pieces=pieces, backwards=True)
    any_order = is_rounding(gradient, turned, reference)
    others = [turned] if any_order else []
    buffers: list[dict[str, Tensor]] = []
    for run in range(_RUNS if repeats else 0):
        start.put_back()
        nudge(reference.model, seed=run)
        moved = reference.gradient(at, pieces=pieces)
        if is_rounding(gradient, moved, reference):  # else a decision has flipped (round, argmax, top-k): no rounding
            others.append(moved)
            buffers.append({name: b.detach().clone() for name, b in reference.model.named_buffers()})
    ended.put_back()
    gradients = _floors(gradient.total, [other.total for other in others if repeats])
    for name, value in gradient.largest.items():
        step = reference.spec.grid * value * len(pieces) * gradient.total[name].numel() ** 0.5
        gradients[name] = max(gradients[name], step)
    kept = _floors({name: b.detach() for name, b in reference.model.named_buffers()}, buffers)
    if reference.spec.together > 1:  # a normalisation over replicas is not the stock kernel
        gradients = {name: value * _OTHER_ARITHMETIC for name, value in gradients.items()}
        kept = {name: value * _OTHER_ARITHMETIC for name, value in kept.items()}
    losses = [abs(other.loss - gradient.loss) for other in others if repeats]
    return Floors(
        gradients=gradients,
        buffers=kept,
        loss=MARGIN * max(*losses, 0.0, _ULPS * _eps(next(iter(gradient.total.values()))) * abs(gradient.loss)),
        repeats=repeats,
        any_order=any_order,
    )


def is_rounding(one: Gradient, other: Gradient, reference: Reference) -> bool:
    """Whether two gradients of the same weights and samples can be apart by the arithmetic alone."""
    first = next(iter(one.total.values()), torch.zeros(()))
    eps = float(torch.finfo(reference.spec.autocast or first.dtype).eps)
    size = sum(float(value.double().norm()) ** 2 for value in one.total.values()) ** 0.5
    apart = sum(distance(value, other.total.get(name, value * 0)) ** 2 for name, value in one.total.items()) ** 0.5
    return not apart > min(MOST_ROUNDING * eps, _MOST_SHARE) * size


def nudge(model: nn.Module, *, seed: int) -> None:
    """Move every trained weight by one unit in the last place, up or down.

    A small one is moved by that of its tensor's usual size.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_floating_point() or not parameter.numel() or not parameter.requires_grad:
                continue
            sign = torch.randint(0, 2, parameter.shape, generator=generator).to(parameter.device) * 2 - 1
            usual = float(parameter.double().square().mean().sqrt())
            parameter.add_(sign * parameter.abs().clamp(min=usual) * _eps(parameter))


def can_nudge(reference: Reference, *, at: At, seed: int) -> bool:
    """Whether that moves the gradient by rounding only; the reference is left as it was."""
    start = Kept(reference.model)
    one = reference.gradient(at)
    start.put_back()
    nudge(reference.model, seed=seed)
    other = reference.gradient(at)
    start.put_back()
    return is_rounding(one, other, reference)


def distance(one: Tensor, other: Tensor) -> float:
    """The Euclidean norm of the difference, in double precision."""
    return float((one.detach().double() - other.detach().double()).norm())


def _floors(right: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    found = {}
    for name, value in right.items():
        moved = [distance(value, other[name]) for other in others if name in other]
        found[name] = MARGIN * max(*moved, 0.0, _ULPS * _eps(value) * float(value.double().norm()))
    return found


def _eps(value: Tensor) -> float:
    return float(torch.finfo(value.dtype).eps) if value.is_floating_point() else 0.0


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}
