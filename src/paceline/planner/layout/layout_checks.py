"""Refuse settings that a layout does not support. The checks need no job and run before the ranks start."""

import math
from collections.abc import Collection, Iterator
from pathlib import Path

from paceline.config.layout import Layout, LayoutKind
from paceline.config.settings import Settings
from paceline.errors import PacelineError, UsageError
from paceline.planner.layout.mesh import Mesh

_INEXACT_REASONS = {
    "cp": "ring attention sums the softmax in a different order",
    "tp": "the ranks' parts of a matmul are added in a different order",
    "ep": "an expert's rows come from several ranks, in a different order",
}


def check_layout_settings(layout: Layout, mesh: Mesh, settings: Settings) -> list[PacelineError]:
    """Return an error for each setting that this layout does not support."""
    train = settings.train
    errors = list(_refuse_exact(mesh, settings)) if train.exact else []
    errors += _refuse_tensor_shards(layout, mesh, settings) if train.tensor_shards is not None else []
    if train.compile and (mesh.tp > 1 or train.tensor_shards is not None):
        cause = "torch.compile does not support tensors that tp shards over the ranks"
        errors.append(
            UsageError("--train.compile with tp is not supported.", cause=cause, hint="leave --train.compile out")
        )
    if train.buffers == "sync_bn" and mesh.ranks > mesh.replicas:
        cause = "it synchronises statistics in the forward, where these ranks also communicate"
        hint = "--train.buffers fold, which gives one process's statistics"
        errors.append(UsageError(f"sync_bn with {mesh} is not supported.", cause=cause, hint=hint))
    return [*errors, *_refuse_missing_tensor_plan(mesh, settings)]


def refuse_unused_place_settings(
    layout: Layout, mesh: Mesh, settings: Settings, *, requested: Collection[str]
) -> list[PacelineError]:
    """Return an error for each `requested` `place` setting that has no effect in this layout."""
    uses_blocks = mesh.pp > 1 or layout.remat != "none" or settings.train.compile
    uses_tensors = mesh.tp > 1 or settings.train.tensor_shards is not None
    uses = {
        "units": (mesh.zero == 3, "which modules are gathered together", "--layout fsdp"),
        "reshard": (mesh.zero == 3, "when gathered parameters are freed", "--layout fsdp"),
        "prefetch": (mesh.zero == 3, "how far ahead parameters are gathered", "--layout fsdp"),
        "stages": (mesh.pp > 1, "how many blocks each stage has", "--layout pp"),
        "balance": (mesh.pp > 1, "how stages are balanced", "--layout pp"),
        "cut": (mesh.pp > 1, "how stages are cut", "--layout pp"),
        "tensor_plan": (uses_tensors, "which weights are split", "--layout tp"),
        "replicate": (uses_tensors, "which weights are not split", "--layout tp"),
        "blocks": (uses_blocks, "what is split, recomputed or compiled", f"--layout {_with_remat(layout)}"),
    }
    return [
        UsageError(
            f"--place.{name} sets {effect}, but layout {layout} does not use it.",
            cause="a different layout was meant, or the setting belongs to an earlier layout",
            hint=f"{hint}, or leave --place.{name} out",
        )
        for name, (is_used, effect, hint) in uses.items()
        if f"place.{name}" in requested and not is_used
    ]


def _with_remat(layout: Layout) -> str:
    """Return a layout that uses blocks: this one with activation checkpointing, or `pp` if this one has no axes."""
    return f"{layout},remat=full" if layout.sizes else "pp"


def _refuse_exact(mesh: Mesh, settings: Settings) -> Iterator[PacelineError]:
    axes = [axis for axis in _INEXACT_REASONS if mesh.size(axis) > 1]
    if axes == ["tp"]:
        if settings.train.tensor_shards is None:
            yield UsageError(
                "exact mode with tp needs --train.tensor_shards.",
                cause="sums over the parts of a weight are exact only if the number of parts is fixed",
                hint=f"--train.tensor_shards {max(_next_power_of_two(mesh.tp), 2)} here and in each run that must "
                "end in the same bits, also on one rank; or --layout fsdp",
            )
    elif axes:
        yield UsageError(
            f"exact mode with {', '.join(axes)} is not supported: sums within a microbatch are split over ranks.",
            cause="; ".join(_INEXACT_REASONS[axis] for axis in axes),
            hint="exact mode works with ddp, zero1, zero2, fsdp, hsdp, pp, tp and their combinations: --layout fsdp",
        )


def _refuse_tensor_shards(layout: Layout, mesh: Mesh, settings: Settings) -> Iterator[PacelineError]:
    """Yield errors for a number of logical shards that exact mode does not support in this layout."""
    shards = settings.train.tensor_shards
    assert shards is not None
    if not settings.train.exact:
        yield UsageError(
            "--train.tensor_shards without --train.exact has no effect.",
            hint="add --train.exact, or leave --train.tensor_shards out",
        )
    if shards != _next_power_of_two(shards):
        yield UsageError(
            f"--train.tensor_shards {shards} is not a power of two.",
            cause="the shards' partial sums are added in a binary tree",
            hint=f"--train.tensor_shards {_next_power_of_two(shards)}",
        )
    elif shards % mesh.tp:
        yield UsageError(
            f"tp={mesh.tp} does not divide --train.tensor_shards {shards}.",
            cause="each rank of tp holds the same number of logical shards",
            hint=f"tp={math.gcd(mesh.tp, shards)}, or another number of shards in every run",
        )
    if layout.sequence:
        yield UsageError(
            "exact mode with sequence=true is not supported.",
            cause="the gradients of norms are summed over the parts of the sequence, in an order that depends on tp",
            hint="leave sequence=true out",
        )
    if layout.kind is LayoutKind.THREADS:
        yield UsageError(
            "--train.tensor_shards with layout threads is not supported.",
            cause="the replicas are threads of one process, which does not split weights",
            hint="--layout ddp",
        )


def _next_power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below the number."""
    return 1 << (number - 1).bit_length()


def _refuse_missing_tensor_plan(mesh: Mesh, settings: Settings) -> Iterator[PacelineError]:
    path = settings.place.tensor_plan
    if path is not None and (mesh.tp > 1 or settings.train.tensor_shards is not None) and not Path(path).is_file():
        yield UsageError(
            f"there is no tensor plan {path}.",
            cause=f"looked for in {Path.cwd()}",
            hint="leave --place.tensor_plan out: the plan is derived from the model; docs/tensor.md shows a file",
        )
