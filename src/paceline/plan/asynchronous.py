"""Update rules that do not wait: what each goes with, and what is told of it before it runs."""

from paceline.errors import PacelineError
from paceline.plan.hogwild import hogwild_notes, refuse_hogwild, refuse_hogwild_settings
from paceline.plan.local import local_notes, refuse_local, refuse_local_settings
from paceline.plan.mesh import Mesh
from paceline.plan.server import refuse_server, refuse_server_settings, server_notes
from paceline.plan.stashed import refuse_stash, refuse_stash_settings, stash_notes
from paceline.spec.layout import Layout
from paceline.spec.settings import Settings
from paceline.spec.update import Update


def refuse_update(update: Update, layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """What this layout has that the update rule can't."""
    return [
        *refuse_stash(update, layout, mesh),
        *refuse_hogwild(update, layout, mesh),
        *refuse_local(update, layout, mesh),
        *refuse_server(update, layout, mesh),
    ]


def refuse_update_settings(update: Update, settings: Settings, *, device: str = "cpu") -> list[PacelineError]:
    """What these settings ask for and the update rule can't do."""
    return [
        *refuse_stash_settings(update, settings),
        *refuse_hogwild_settings(update, settings, device=device),
        *refuse_local_settings(update, settings),
        *refuse_server_settings(update, settings, device=device),
    ]


def update_notes(update: Update, mesh: Mesh, *, num_micro: int) -> list[str]:
    """Lines for the banner; none of a rule that waits."""
    return [
        *stash_notes(update, mesh, num_micro=num_micro),
        *hogwild_notes(update, mesh),
        *local_notes(update, mesh),
        *server_notes(update, mesh),
    ]
