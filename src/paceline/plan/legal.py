"""Which products of axes and options can't be had, and why."""

from dataclasses import dataclass

from paceline.errors import LayoutError, PacelineError
from paceline.plan.mesh import Mesh
from paceline.plan.pipeline import refuse_schedule
from paceline.spec.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Never:
    """Two things that do not go together: `axes`, or an axis and an option."""

    axes: tuple[str, ...]
    reason: str
    instead: str
    remat: bool = False


NEVER = (
    Never(
        axes=("ep", "tp"),
        reason="an expert's matrices would be cut twice, by two owners",
        instead="dp_replicate=2,ep=2, or tp=2, whose ranks split each expert",
    ),
    Never(
        axes=("ep", "cp"),
        reason="experts' gradients are added over replicas, and slices of one sequence are none",
        instead="dp_replicate=2,ep=2, or cp=2",
    ),
    Never(
        axes=("cp",),
        remat=True,
        reason="a block that runs again in backward would have to send around the ring again, in step on all ranks",
        instead="cp=2, or dp_shard=2,remat=full",
    ),
)


def refuse_products(layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """What a mesh asks for that can't be had, whatever the model is."""
    found = refuse_schedule(layout, mesh)
    for never in NEVER:
        if set(never.axes) <= set(mesh.split) and (not never.remat or layout.remat != "none"):
            what = " with ".join([*never.axes, *(["remat"] if never.remat else [])])
            found.append(LayoutError(f"{what} can't be had.", cause=never.reason, hint=f"--layout {never.instead}"))
    return found
