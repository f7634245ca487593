"""Checks of what Hogwild can be combined with."""

from collections.abc import Iterator

from paceline.config.layout import Layout
from paceline.config.layout import LayoutKind as LayoutKind
from paceline.config.update_rule import UpdateKind, UpdateRule
from paceline.errors import LayoutError, PacelineError
from paceline.planner.layout.mesh import Mesh


def refuse_hogwild(update: UpdateRule, layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """Return the errors of a layout in which a Hogwild worker would not have the whole model."""
    if update.kind is not UpdateKind.HOGWILD:
        return []
    found: list[PacelineError] = []
    others = [axis for axis in mesh.split if axis != "dp_replicate"]
    if others or layout.kind is LayoutKind.THREADS:
        found.append(
            LayoutError(
                f"--update hogwild needs ddp, not {layout}.",
                cause="its workers are processes that write to one shared model without waiting for each other",
                hint=f"--layout ddp --ranks {mesh.ranks} --update hogwild",
            )
        )
    elif mesh.ranks == 1:
        found.append(
            LayoutError(
                "--update hogwild with one rank: no other worker races with it.",
                cause="it would equal a single process",
                hint="--ranks 2, or --update sync",
            )
        )
    return found


def hogwild_notes(update: UpdateRule, mesh: Mesh) -> Iterator[str]:
    """Yield the banner line on Hogwild."""
    if update.kind is UpdateKind.HOGWILD:
        yield f"update: hogwild, {mesh.ranks} workers write to one model without locks, each with its own gradient"
