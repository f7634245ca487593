"""Checks and banner lines for asynchronous update rules: what each can be combined with."""

from paceline.config.layout import Layout
from paceline.config.update_rule import UpdateRule
from paceline.errors import PacelineError
from paceline.planner.layout.hogwild_rules import hogwild_notes, refuse_hogwild
from paceline.planner.layout.local_sgd_checks import local_notes, refuse_local
from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.parameter_server_checks import refuse_server, server_notes
from paceline.planner.layout.pipedream_checks import refuse_stash, stash_notes


def refuse_update(update: UpdateRule, layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """Return an error for each feature of the layout that the update rule cannot have."""
    return [
        *refuse_stash(update, layout, mesh),
        *refuse_hogwild(update, layout, mesh),
        *refuse_local(update, layout, mesh),
        *refuse_server(update, layout, mesh),
    ]


def update_notes(update: UpdateRule, mesh: Mesh, *, num_micro: int) -> list[str]:
    """Return the banner lines on an asynchronous update rule; none for a synchronous one."""
    return [
        *stash_notes(update, mesh, num_micro=num_micro),
        *hogwild_notes(update, mesh),
        *local_notes(update, mesh),
        *server_notes(update, mesh),
    ]
