"""Read the options of full sharding from the layout and the settings."""

from dataclasses import dataclass, field

import torch
from torch import nn

from paceline.config.layout import Layout
from paceline.config.settings import PlacementSettings
from paceline.parallel.sharding.units import UnitChoice, parse_units


@dataclass(frozen=True, kw_only=True)
class FullShardOptions:
    """Options of full sharding.

    `units` chooses the modules whose parameters are gathered together. With `reshard`, the parameters of a unit are
    freed between forward and backward. None frees them for all units except the root module, whose parameters backward
    needs first. `prefetch` is the number of units that are gathered ahead; 0 selects torch's default. `param_dtype` is
    the dtype in which parameters are gathered and used; None keeps each parameter's dtype. With `offload`, parameters,
    gradients and optimizer state are kept in host memory.
    """

    units: UnitChoice = field(default_factory=UnitChoice)
    reshard: bool | None = None
    prefetch: int = 0
    param_dtype: torch.dtype | None = None
    offload: bool = False


def make_full_shard_options(model: nn.Module, *, layout: Layout, settings: PlacementSettings) -> FullShardOptions:
    """Return the full-sharding options of a layout and its placement settings."""
    return FullShardOptions(
        units=parse_units(settings.units, model=model),
        reshard=settings.reshard,
        prefetch=settings.prefetch,
        param_dtype=torch.bfloat16 if layout.params == "bf16" else None,
        offload="parameters" in layout.offload,
    )
