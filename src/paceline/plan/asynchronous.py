"""Update rules that do not wait: what each goes with, and what is told of it before it runs."""

from paceline.errors import PacelineError
from paceline.plan.hogwild import hogwild_notes, refuse_hogwild
from paceline.plan.local import local_notes, refuse_local
from paceline.plan.mesh import Mesh
from paceline.plan.server import refuse_server, server_notes
from paceline.plan.stashed import refuse_stash, stash_notes
from paceline.spec.layout import Layout
from paceline.spec.update import Update


def refuse_update(update: Update, layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """What this layout has that the update rule can't."""
    return [
        *refuse_stash(update, layout, mesh),
        *refuse_hogwild(update, layout, mesh),
        *refuse_local(update, layout, mesh),
        *refuse_server(update, layout, mesh),
    ]


def update_notes(update: Update, mesh: Mesh, *, num_micro: int) -> list[str]:
    """Lines for the banner; none of a rule that waits."""
    return [
        *stash_notes(update, mesh, num_micro=num_micro),
        *hogwild_notes(update, mesh),
        *local_notes(update, mesh),
        *server_notes(update, mesh),
    ]
