"""Private parts of `fully_shard`: keep units gathered until the caller frees them. Tried on torch 2.11 and 2.13."""

from collections.abc import Iterable
from typing import Any

from torch.distributed.fsdp import FSDPModule


class GatheredUnits:
    """Units that stay gathered: the hooks of `fully_shard` free no unit of them, only `free` does.

    With several forwards of one module at a time, the hooks would free a unit when the first of them leaves it.
    """

    def __init__(self, units: Iterable[FSDPModule]) -> None:
        self._reshards = []
        for unit in units:
            for group in _parameter_groups(unit):
                self._reshards.append(group.reshard)
                group.reshard = _do_nothing

    def free(self) -> None:
        """Free the gathered parameters of all units."""
        for reshard in self._reshards:
            reshard()


def _parameter_groups(unit: FSDPModule) -> list[Any]:
    state: Any = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.11 has one group at most
    return [group for group in (groups if groups is not None else [state._fsdp_param_group]) if group is not None]


def _do_nothing() -> None:
    return None
