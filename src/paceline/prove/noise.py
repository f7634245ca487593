"""How far two right answers may be apart: a floor per tensor, measured and not assumed.

One process computes the same gradient again with every weight moved by one unit in the last place, and with
the microbatches added in reverse. What moves by that is rounding; a tensor whose true gradient is zero has its
own floor, far above its size.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from paceline.prove.reference import Gradient, Reference

MARGIN = 16.0
_RUNS = 3


def gradient_floor(
    reference: Reference, gradient: Gradient, *, step: int, epoch: int, position: int
) -> dict[str, float]:
    """The largest change of each tensor's gradient (Euclidean norm) over disturbed runs, with a margin."""
    right = gradient.total()
    others = [gradient.total(reverse=True)]
    kept = {name: p.detach().clone() for name, p in reference.model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in reference.model.named_buffers()}
    for run in range(_RUNS):
        nudge(reference, seed=run)
        others.append(reference.gradient(step=step, epoch=epoch, position=position).total())
        put_back(reference, kept, buffers)
    return _floors(right, others)


def nudge(reference: Reference, *, seed: int) -> None:
    """Move every weight by one unit in the last place, up or down."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in reference.model.parameters():
            if not parameter.is_floating_point():
                continue
            up = torch.rand(parameter.shape, generator=generator) < 0.5
            towards = torch.where(up, torch.inf, -torch.inf).to(parameter.dtype)
            parameter.copy_(torch.nextafter(parameter, towards) if parameter.dtype.itemsize > 2 else parameter)


def put_back(reference: Reference, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Undo a disturbed run."""
    with torch.no_grad():
        for name, parameter in reference.model.named_parameters():
            parameter.copy_(weights[name])
        for name, buffer in reference.model.named_buffers():
            buffer.copy_(buffers[name])


def _floors(right: Mapping[str, Tensor], others: Sequence[Mapping[str, Tensor]]) -> dict[str, float]:
    total = sum(float(value.double().norm()) ** 2 for value in right.values()) ** 0.5
    floors = {}
    for name, value in right.items():
        eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0
        moved = [distance(value, other[name]) for other in others if name in other]
        size = max(float(value.double().norm()), 1e-3 * eps * total)
        floors[name] = MARGIN * max(*moved, 4.0 * eps * size)
    return floors


def distance(one: Tensor, other: Tensor) -> float:
    """The Euclidean norm of the difference, in double precision."""
    return float((one.detach().double() - other.detach().double()).norm())
