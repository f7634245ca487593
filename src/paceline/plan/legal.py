"""Which layouts are proved equal to one process, and which are not there yet."""

from paceline.errors import LayoutError, PacelineError
from paceline.plan.mesh import Mesh
from paceline.plan.pipeline import refuse_schedule
from paceline.spec.layout import Layout

_PROVED = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def refuse_unproved(layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """What a mesh asks for that this version can't do."""
    missing = [axis for axis in mesh.split if axis not in _PROVED]
    problems = refuse_schedule(layout, mesh)
    if not missing:
        return problems
    return [
        *problems,
        LayoutError(
            f"the layout {layout} is not in this version yet: {', '.join(missing)}.",
            cause="it splits data and shards parameters: ddp, zero1, zero2, fsdp, hsdp",
            hint="--layout ddp",
        ),
    ]
