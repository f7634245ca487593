"""Refuse settings that a layout does not support. The checks need no job and run before the ranks start."""

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
    shards = settings.train.sequence_shards
    errors = list(_refuse_exact(mesh, has_shards=shards is not None)) if train.exact else []
    errors += [] if shards is None else _refuse_sequence_shards(shards, layout, mesh, settings)
    if train.compile and mesh.tp > 1:
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
    uses = {
        "units": (mesh.zero == 3, "which modules are gathered together", "--layout fsdp"),
        "reshard": (mesh.zero == 3, "when gathered parameters are freed", "--layout fsdp"),
        "prefetch": (mesh.zero == 3, "how far ahead parameters are gathered", "--layout fsdp"),
        "stages": (mesh.pp > 1, "how many blocks each stage has", "--layout pp"),
        "balance": (mesh.pp > 1, "how stages are balanced", "--layout pp"),
        "cut": (mesh.pp > 1, "how stages are cut", "--layout pp"),
        "tensor_plan": (mesh.tp > 1, "which weights are split", "--layout tp"),
        "replicate": (mesh.tp > 1, "which weights are not split", "--layout tp"),
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


def _refuse_exact(mesh: Mesh, *, has_shards: bool) -> Iterator[PacelineError]:
    axes = [axis for axis in _INEXACT_REASONS if mesh.size(axis) > 1 and not (axis == "cp" and has_shards)]
    if axes == ["cp"]:
        yield UsageError(
            "exact mode with cp needs --train.sequence_shards.",
            cause="ring attention and the gradients add the parts of a sequence, so the parts must not depend on cp",
            hint=f"--train.sequence_shards {max(mesh.cp, 2)} here and in each run that must end in the same bits, "
            "also on one rank; or --layout fsdp",
        )
    elif axes:
        yield UsageError(
            f"exact mode with {', '.join(axes)} is not supported: sums within a microbatch are split over ranks.",
            cause="; ".join(_INEXACT_REASONS[axis] for axis in axes),
            hint="exact mode works with ddp, zero1, zero2, fsdp, hsdp, pp and their combinations: --layout fsdp",
        )


def _refuse_sequence_shards(shards: int, layout: Layout, mesh: Mesh, settings: Settings) -> Iterator[PacelineError]:
    """Yield an error if a layout or setting does not support a fixed number of sequence shards."""
    name = f"--train.sequence_shards {shards}"
    if not settings.train.exact:
        yield UsageError(
            f"{name} has an effect only in exact mode.",
            cause="without exact mode, cp splits a sequence into as many parts as there are cp ranks",
            hint="--train.exact, or leave --train.sequence_shards out",
        )
        return
    if shards % mesh.cp:
        yield UsageError(
            f"{name} can't be divided by cp={mesh.cp}.",
            cause="every cp rank computes the same number of parts of a sequence",
            hint=f"--train.sequence_shards {-(-shards // mesh.cp) * mesh.cp} for a new run, or a cp that divides "
            f"{shards}",
        )
    axes = [axis for axis in ("tp", "ep") if mesh.size(axis) > 1]
    unsupported = {
        f"--layout {layout}": (bool(axes), f"{' and '.join(axes)} would also split the sums of a part over ranks"),
        "--layout threads": (layout.kind is LayoutKind.THREADS, "replicas in threads share the model's modules"),
        "--train.compile": (settings.train.compile, "the parts of a sequence run in threads that take turns"),
    }
    for other, (is_used, cause) in unsupported.items():
        if is_used:
            yield UsageError(
                f"{name} with {other} is not supported.",
                cause=cause,
                hint="cp, ddp, zero1, zero2, fsdp, hsdp, pp and their combinations, without --train.compile",
            )


def _refuse_missing_tensor_plan(mesh: Mesh, settings: Settings) -> Iterator[PacelineError]:
    path = settings.place.tensor_plan
    if path is not None and mesh.tp > 1 and not Path(path).is_file():
        yield UsageError(
            f"there is no tensor plan {path}.",
            cause=f"looked for in {Path.cwd()}",
            hint="leave --place.tensor_plan out: the plan is derived from the model; docs/tensor.md shows a file",
        )
