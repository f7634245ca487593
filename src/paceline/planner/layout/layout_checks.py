"""Refuse settings that a layout does not support. The checks need no job and run before the ranks start."""

from collections.abc import Collection, Iterator
from pathlib import Path

from paceline.config.layout import Layout
from paceline.config.settings import Settings
from paceline.errors import PacelineError, UsageError
from paceline.planner.layout.exact_checks import check_exact_settings
from paceline.planner.layout.mesh import Mesh


def check_layout_settings(layout: Layout, mesh: Mesh, settings: Settings) -> list[PacelineError]:
    """Return an error for each setting that this layout does not support."""
    train = settings.train
    errors = list(check_exact_settings(layout, mesh, settings))
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


def _refuse_missing_tensor_plan(mesh: Mesh, settings: Settings) -> Iterator[PacelineError]:
    path = settings.place.tensor_plan
    if path is not None and (mesh.tp > 1 or settings.train.tensor_shards is not None) and not Path(path).is_file():
        yield UsageError(
            f"there is no tensor plan {path}.",
            cause=f"looked for in {Path.cwd()}",
            hint="leave --place.tensor_plan out: the plan is derived from the model; docs/tensor.md shows a file",
        )
