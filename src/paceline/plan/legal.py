"""Which layouts are proved equal to one process, and which are not there yet."""

from paceline.errors import LayoutError, PacelineError
from paceline.plan.mesh import Mesh
from paceline.spec.layout import Layout

_PROVED = ("pp", "dp_replicate", "dp_shard")


def refuse_unproved(layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """What a mesh asks for that this version can't do."""
    missing = [axis for axis in mesh.split if axis not in _PROVED]
    if not missing:
        return []
    return [
        LayoutError(
            f"the layout {layout} is not in this version yet: {', '.join(missing)}.",
            cause="it splits data and shards parameters: ddp, zero1, zero2, fsdp, hsdp",
            hint="--layout ddp",
        )
    ]
