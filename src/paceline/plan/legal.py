"""Which products of axes and options can't be had, and why."""

from paceline.errors import PacelineError
from paceline.plan.mesh import Mesh
from paceline.plan.pipeline import refuse_schedule
from paceline.spec.layout import Layout


def refuse_products(layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """What a mesh asks for that can't be had, whatever the model is."""
    return refuse_schedule(layout, mesh)
