"""Update rules that do not wait: what each goes with, and what is told of it before it runs."""

from paceline.config.layout import Layout
from paceline.config.update_rule import UpdateRule
from paceline.errors import PacelineError
from paceline.planner.layout.hogwild_rules import hogwild_notes, refuse_hogwild
from paceline.planner.layout.local_sgd_checks import local_notes, refuse_local
from paceline.planner.layout.mesh import Mesh
from paceline.planner.layout.parameter_server_checks import refuse_server, server_notes
from paceline.planner.layout.pipedream_checks import refuse_stash, stash_notes


def refuse_update(update: UpdateRule, layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """What this layout has that the update rule can't."""
    return [
        *refuse_stash(update, layout, mesh),
        *refuse_hogwild(update, layout, mesh),
        *refuse_local(update, layout, mesh),
        *refuse_server(update, layout, mesh),
    ]


def update_notes(update: UpdateRule, mesh: Mesh, *, num_micro: int) -> list[str]:
    """Lines for the banner; none of a rule that waits."""
    return [
        *stash_notes(update, mesh, num_micro=num_micro),
        *hogwild_notes(update, mesh),
        *local_notes(update, mesh),
        *server_notes(update, mesh),
    ]
