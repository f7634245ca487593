"""Options of full sharding."""

from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.config.layout import Layout
from paceline.config.settings import PlacementSettings
from paceline.parallel.sharding.units import UnitChoice, units_of


@dataclass(frozen=True, kw_only=True)
class FullySharded:
    """Options of full sharding. `units` chooses the modules whose parameters are gathered together.

    `reshard`: whether a unit's parameters are freed between forward and backward; None frees all but the model's
    own, which backward needs first. `prefetch`: how many units ahead are gathered; 0 leaves it to torch.
    `params`: the dtype that parameters are gathered and used in; None keeps their own. `offload`: keep parameters,
    gradients and optimizer state in host memory.
    """

    units: UnitChoice = field(default_factory=UnitChoice)
    reshard: bool | None = None
    prefetch: int = 0
    params: torch.dtype | None = None
    offload: bool = False


def fsdp_options(model: nn.Module, *, asked: Layout, how: PlacementSettings) -> FullySharded:
    """Return the full-sharding options that the layout and the placement settings ask for."""
    return FullySharded(
        units=units_of(how.units, model=model),
        reshard=how.reshard,
        prefetch=how.prefetch,
        params=torch.bfloat16 if asked.params == "bf16" else None,
        offload="parameters" in asked.offload,
    )
