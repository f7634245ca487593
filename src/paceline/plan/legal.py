"""Which products of axes and options can't be had, and why."""

from paceline.errors import LayoutError, PacelineError
from paceline.plan.mesh import Mesh
from paceline.plan.pipeline import refuse_schedule
from paceline.spec.layout import Layout


def refuse_products(layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """What a mesh asks for that can't be had, whatever the model is."""
    found = refuse_schedule(layout, mesh)
    if mesh.cp > 1 and layout.remat != "none":
        found.append(
            LayoutError(
                "cp with remat can't be had.",
                cause="a block that runs again in backward would have to send around the ring again, in step on all "
                "ranks",
                hint="--layout cp=2, or dp_shard=2,remat=full",
            )
        )
    return found
