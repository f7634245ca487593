"""Refuse layouts and settings that exact mode cannot be combined with, and numbers of shards that do not fit.

A sum within a microbatch is exact if the number of its terms does not depend on the layout. So tp needs a fixed number
of tensor shards, and cp a fixed number of sequence shards.
"""

import math
from collections.abc import Iterator

from paceline.config.layout import Layout, LayoutKind
from paceline.config.settings import Settings
from paceline.errors import PacelineError, UsageError
from paceline.planner.layout.mesh import Mesh

_EXACT_LAYOUTS = "ddp, zero1, zero2, fsdp, hsdp, pp, tp, cp"


def check_exact_settings(layout: Layout, mesh: Mesh, settings: Settings) -> Iterator[PacelineError]:
    """Yield an error for each axis and setting that exact mode does not support, and for shards without exact mode."""
    train = settings.train
    if train.exact:
        yield from _refuse_inexact_axes(mesh, settings)
    if train.tensor_shards is not None:
        yield from _refuse_tensor_shards(train.tensor_shards, layout, mesh, settings)
    if train.sequence_shards is not None:
        yield from _refuse_sequence_shards(train.sequence_shards, layout, mesh, settings)


def _refuse_inexact_axes(mesh: Mesh, settings: Settings) -> Iterator[PacelineError]:
    if mesh.ep > 1:
        yield UsageError(
            "exact mode with ep is not supported.",
            cause="an expert's rows come from several ranks, in an order that depends on their number",
            hint=f"exact mode works with {_EXACT_LAYOUTS}: --layout fsdp",
        )
    if mesh.tp > 1 and settings.train.tensor_shards is None:
        yield UsageError(
            "exact mode with tp needs --train.tensor_shards, the number of parts of each split weight.",
            cause="sums over the parts of a weight are exact only if the number of parts is fixed",
            hint=f"--train.tensor_shards {max(_next_power_of_two(mesh.tp), 2)} here and in each run that must end in "
            "the same bits, also on one rank; or --layout fsdp",
        )
    if mesh.cp > 1 and settings.train.sequence_shards is None:
        yield UsageError(
            "exact mode with cp needs --train.sequence_shards, the number of parts of each sequence.",
            cause="ring attention and the gradients add the parts of a sequence, so their number must be fixed",
            hint=f"--train.sequence_shards {mesh.cp} here and in each run that must end in the same bits, also on one "
            "rank; or --layout fsdp",
        )


def _refuse_tensor_shards(shards: int, layout: Layout, mesh: Mesh, settings: Settings) -> Iterator[PacelineError]:
    name = f"--train.tensor_shards {shards}"
    yield from _refuse_without_exact(name, settings)
    if shards != _next_power_of_two(shards):
        yield UsageError(
            f"{name} is not a power of two.",
            cause="the shards' partial sums are added in a binary tree",
            hint=f"--train.tensor_shards {_next_power_of_two(shards)}",
        )
    elif shards % mesh.tp:
        yield UsageError(
            f"{name} can't be divided by tp={mesh.tp}.",
            cause="each rank of tp holds the same number of shards",
            hint=f"tp={math.gcd(mesh.tp, shards)}, or another number of shards in every run",
        )
    if layout.sequence:
        yield UsageError(
            "exact mode with sequence=true is not supported.",
            cause="the gradients of norms are summed over the parts of the sequence, in an order that depends on tp",
            hint="leave sequence=true out",
        )
    yield from _refuse_threads(name, layout)


def _refuse_sequence_shards(shards: int, layout: Layout, mesh: Mesh, settings: Settings) -> Iterator[PacelineError]:
    name = f"--train.sequence_shards {shards}"
    yield from _refuse_without_exact(name, settings)
    if shards % mesh.cp:
        yield UsageError(
            f"{name} can't be divided by cp={mesh.cp}.",
            cause="each rank of cp computes the same number of parts of a sequence",
            hint=f"cp={math.gcd(mesh.cp, shards)}, or another number of shards in every run",
        )
    yield from _refuse_threads(name, layout)
    axes = [axis for axis in ("tp", "ep") if mesh.size(axis) > 1]
    unsupported = {
        f"--layout {layout}": (bool(axes), f"{' and '.join(axes)} would also split the sums of a part over ranks"),
        "--train.tensor_shards": (
            settings.train.tensor_shards is not None,
            "the parts of a sequence would take turns within the sums over the parts of a weight",
        ),
        "--train.compile": (settings.train.compile, "the parts of a sequence run in threads that take turns"),
    }
    for other, (is_used, cause) in unsupported.items():
        if is_used:
            yield UsageError(
                f"{name} with {other} is not supported.",
                cause=cause,
                hint="cp, ddp, zero1, zero2, fsdp, hsdp, pp and their combinations, without this option",
            )


def _refuse_without_exact(name: str, settings: Settings) -> Iterator[PacelineError]:
    if not settings.train.exact:
        yield UsageError(
            f"{name} has an effect only in exact mode.",
            cause="without exact mode, there are as many parts as ranks",
            hint=f"--train.exact, or leave {name.partition(' ')[0]} out",
        )


def _refuse_threads(name: str, layout: Layout) -> Iterator[PacelineError]:
    if layout.kind is LayoutKind.THREADS:
        yield UsageError(
            f"{name} with layout threads is not supported.",
            cause="the replicas are threads of one process, which share the model's modules",
            hint="--layout ddp",
        )


def _next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()
