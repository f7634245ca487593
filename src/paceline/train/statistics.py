"""Optional numbers about each parameter: the sizes of its weight and of its gradient, by FQN."""

from collections.abc import Sequence

import torch

from paceline.place.units import Named


def statistics(named: Sequence[Named]) -> dict[str, float]:
    """`weight_norm/FQN`, and `grad_norm/FQN` where there is a gradient."""
    found: dict[str, float] = {}
    for member in named:
        found[f"weight_norm/{member.name}"] = float(torch.linalg.vector_norm(member.parameter.detach()))
        if member.parameter.grad is not None:
            found[f"grad_norm/{member.name}"] = float(torch.linalg.vector_norm(member.parameter.grad))
    return found
