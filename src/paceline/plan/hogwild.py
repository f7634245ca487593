"""Hogwild: what it goes with."""

from collections.abc import Iterator

from paceline.errors import LayoutError, PacelineError, UsageError
from paceline.plan.mesh import Mesh
from paceline.spec.layout import Kind as LayoutKind
from paceline.spec.layout import Layout
from paceline.spec.settings import Settings
from paceline.spec.update import Kind, Update


def refuse_hogwild(update: Update, layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """Workers that write to the same memory each have the whole model."""
    if update.kind is not Kind.HOGWILD:
        return []
    found: list[PacelineError] = []
    others = [axis for axis in mesh.split if axis != "dp_replicate"]
    if others or layout.kind is LayoutKind.THREADS:
        found.append(
            LayoutError(
                f"--update hogwild goes with ddp, not with {layout}.",
                cause="its workers are processes that write to the same whole model without waiting for each other",
                hint=f"--layout ddp --ranks {mesh.ranks} --update hogwild",
            )
        )
    elif mesh.ranks == 1:
        found.append(
            LayoutError(
                "--update hogwild with one rank: nobody races with it.",
                cause="that is what one process does",
                hint="--ranks 2, or --update sync",
            )
        )
    return found


def refuse_hogwild_settings(update: Update, settings: Settings, *, device: str) -> Iterator[PacelineError]:
    """What workers that agree on nothing can't have."""
    if update.kind is not Kind.HOGWILD:
        return
    train = settings.train
    for is_on, name, cause, hint in (
        (device != "cpu", f"--device {device}", "workers share the memory of the machine, not a GPU's", "--device cpu"),
        (train.exact, "--train.exact", "a race has no bits that come again", "leave it out, or --update sync"),
        (train.precision == "fp16", "fp16", "the loss scale would be each worker's own", "--train.precision bf16"),
        (train.buffers == "sync_bn", "sync_bn", "its statistics meet in the forward", "leave --train.buffers out"),
        (
            train.tokens is not None,
            "--train.tokens",
            "tokens are heard some steps late",
            "--train.steps or --train.samples",
        ),
        (settings.log.statistics, "--log.statistics", "each worker has gradients of its own", "leave it out"),
    ):
        if is_on:
            yield UsageError(f"{name} with --update hogwild can't be had.", cause=cause, hint=hint)


def hogwild_notes(update: Update, mesh: Mesh) -> Iterator[str]:
    """What is decided."""
    if update.kind is Kind.HOGWILD:
        yield f"update: hogwild, {mesh.ranks} workers write to one model without locks, each with its own gradient"
