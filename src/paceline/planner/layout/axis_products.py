"""Which products of axes and options can't be had, and why."""

from paceline.config.layout import Layout
from paceline.errors import PacelineError
from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.pipeline_options import refuse_schedule


def check_axis_products(layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """What a mesh asks for that can't be had, whatever the model is."""
    return refuse_schedule(layout, mesh)
