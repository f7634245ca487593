"""Checks of combinations of axes and options that are impossible."""

from paceline.config.layout import Layout
from paceline.errors import PacelineError
from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.pipeline_options import refuse_schedule


def check_axis_products(layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """Return the errors of a layout that is impossible for every model."""
    return refuse_schedule(layout, mesh)
