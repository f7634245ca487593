"""Checks of settings that a layout cannot have, whatever the job is, before anything starts."""

from collections.abc import Collection, Iterator
from pathlib import Path

from paceline.config.layout import Layout
from paceline.config.settings import Settings
from paceline.errors import PacelineError, UsageError
from paceline.planner.layout.mesh import Mesh

_ADDS = {
    "cp": "ring attention sums the softmax in a different order",
    "tp": "the ranks' parts of a matmul are added in a different order",
    "ep": "an expert's rows come from several ranks, in a different order",
}


def check_layout_settings(layout: Layout, mesh: Mesh, settings: Settings) -> list[PacelineError]:
    """Return an error for each setting that this layout cannot have."""
    train = settings.train
    found = list(_inexact(mesh)) if train.exact else []
    if train.compile and mesh.tp > 1:
        cause = "torch.compile does not support tensors that tp shards over the ranks"
        found.append(
            UsageError("--train.compile with tp is not supported.", cause=cause, hint="leave --train.compile out")
        )
    if train.buffers == "sync_bn" and mesh.ranks > mesh.replicas:
        cause = "it synchronises statistics in the forward, where these ranks also communicate"
        hint = "--train.buffers fold, which gives one process's statistics"
        found.append(UsageError(f"sync_bn with {mesh} is not supported.", cause=cause, hint=hint))
    return [*found, *_no_file(mesh, settings)]


def refuse_homeless(layout: Layout, mesh: Mesh, settings: Settings, *, asked: Collection[str]) -> list[PacelineError]:
    """Return an error for each `place` setting in `asked` that has no effect in this layout."""
    blocks = mesh.pp > 1 or layout.remat != "none" or settings.train.compile
    homes = {
        "units": (mesh.zero == 3, "which modules are gathered together", "--layout fsdp"),
        "reshard": (mesh.zero == 3, "when gathered parameters are freed", "--layout fsdp"),
        "prefetch": (mesh.zero == 3, "how far ahead parameters are gathered", "--layout fsdp"),
        "stages": (mesh.pp > 1, "how many blocks each stage has", "--layout pp"),
        "balance": (mesh.pp > 1, "how stages are balanced", "--layout pp"),
        "cut": (mesh.pp > 1, "how stages are cut", "--layout pp"),
        "tensor_plan": (mesh.tp > 1, "which weights are split", "--layout tp"),
        "replicate": (mesh.tp > 1, "which weights are not split", "--layout tp"),
        "blocks": (blocks, "what is split, recomputed or compiled", f"--layout {_with_remat(layout)}"),
    }
    return [
        UsageError(
            f"--place.{name} sets {says}, but layout {layout} does not use it.",
            cause="a different layout was meant, or the setting belongs to an earlier layout",
            hint=f"{hint}, or leave --place.{name} out",
        )
        for name, (has_home, says, hint) in homes.items()
        if f"place.{name}" in asked and not has_home
    ]


def _with_remat(layout: Layout) -> str:
    return f"{layout},remat=full" if layout.sizes else "pp"


def _inexact(mesh: Mesh) -> Iterator[PacelineError]:
    axes = [axis for axis in _ADDS if mesh.size(axis) > 1]
    if axes:
        yield UsageError(
            f"exact mode with {', '.join(axes)} is not supported: it splits sums within a microbatch.",
            cause="; ".join(_ADDS[axis] for axis in axes),
            hint="exact mode works with ddp, zero1, zero2, fsdp, hsdp, pp and their combinations: --layout fsdp",
        )


def _no_file(mesh: Mesh, settings: Settings) -> Iterator[PacelineError]:
    file = settings.place.tensor_plan
    if file is not None and mesh.tp > 1 and not Path(file).is_file():
        yield UsageError(
            f"there is no tensor plan {file}.",
            cause=f"looked for in {Path.cwd()}",
            hint="leave --place.tensor_plan out: the plan is derived from the model; docs/tensor.md shows a file",
        )
