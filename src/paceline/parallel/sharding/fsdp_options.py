"""What can be chosen about full sharding."""

from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.config.layout import Layout
from paceline.config.settings import PlacementSettings
from paceline.parallel.sharding.units import UnitChoice, units_of


@dataclass(frozen=True, kw_only=True)
class FullySharded:
    """`units` are gathered together.

    `reshard`: whether a unit's parameters are freed between forward and backward; None frees all but the model's
    own, which backward needs first. `prefetch`: how many units ahead are gathered; 0 leaves it to torch.
    `params`: the type that parameters are gathered and used in, where that is not their own. `offload`: keep
    parameters, gradients and optimizer state in host memory.
    """

    units: UnitChoice = field(default_factory=UnitChoice)
    reshard: bool | None = None
    prefetch: int = 0
    params: torch.dtype | None = None
    offload: bool = False


def fsdp_options(model: nn.Module, *, asked: Layout, how: PlacementSettings) -> FullySharded:
    """What layout and settings say of it."""
    return FullySharded(
        units=units_of(how.units, model=model),
        reshard=how.reshard,
        prefetch=how.prefetch,
        params=torch.bfloat16 if asked.params == "bf16" else None,
        offload="parameters" in asked.offload,
    )
