"""Checks of what compressed gradients can be combined with."""

from collections.abc import Iterator

from paceline.config.compression import Compression, Method
from paceline.config.layout import Layout, LayoutKind
from paceline.config.settings import Settings
from paceline.config.update_rule import UpdateKind as UpdateKind
from paceline.config.update_rule import UpdateRule
from paceline.errors import LayoutError, PacelineError, UsageError
from paceline.planner.layout.mesh import Mesh, mesh_of

_SHARDED = "each rank adds up its own rows there, and most of what is sent are parameters, which are not compressed"
_PARTS = "most of what these ranks send each other are activations, or parts of sums, which are not compressed"
_THREADS = "replicas that are threads share their memory and send nothing"


def refuse_wire(
    compress: Compression, update: UpdateRule, layout: Layout, *, ranks: int, settings: Settings | None
) -> list[PacelineError]:
    """Return the errors of `refuse_compress` and, with `settings`, of `refuse_compress_settings`."""
    found = refuse_compress(compress, update, layout, mesh_of(layout, ranks=ranks, problems=[]))
    return [*found, *(refuse_compress_settings(compress, settings) if settings is not None else ())]


def refuse_compress(compress: Compression, update: UpdateRule, layout: Layout, mesh: Mesh) -> list[PacelineError]:
    """Return the errors of a layout or update rule that compression does not support.

    Compression applies between synchronous replicas of the whole model.
    """
    if not compress.is_on:
        return []
    found: list[PacelineError] = []
    others = [axis for axis in mesh.split if axis != "dp_replicate"]
    threads = layout.kind is LayoutKind.THREADS
    if others or threads:
        sharded = "dp_shard" in others
        instead = f"--layout ddp --ranks {mesh.ranks} --compress {compress}"
        found.append(
            LayoutError(
                f"--compress {compress.method} goes with ddp, not with {layout}.",
                cause=_THREADS if threads else _SHARDED if sharded else _PARTS,
                hint=f"{instead}, or --layout fsdp,params=bf16" if sharded and mesh.zero == 3 else instead,
            )
        )
    elif mesh.ranks == 1:
        found.append(
            LayoutError(
                f"--compress {compress.method} with one rank: it sends nothing.",
                cause="gradients are compressed where replicas send them to each other",
                hint=f"--ranks 2 --compress {compress}, or leave --compress out",
            )
        )
    if update.kind is not UpdateKind.SYNC:
        found.append(
            LayoutError(
                f"--compress {compress.method} goes with --update sync, not with {update}.",
                cause="it changes how the gradients of one step are added up, and there they are not",
                hint=f"--update sync --compress {compress}",
            )
        )
    return found


def refuse_compress_settings(
    compress: Compression, settings: Settings, *, backend: str = ""
) -> Iterator[PacelineError]:
    """Yield an error for each setting that excludes compressed gradients; `backend` is that of GPUs."""
    if not compress.is_on:
        return
    if settings.train.exact:
        yield UsageError(
            f"--train.exact with --compress {compress.method} can't be had.",
            cause="exact mode adds up all of every gradient, so that the number of ranks changes no bit",
            hint="leave one of them out",
        )
    if backend == "gloo" and compress.method is not Method.POWERSGD:
        yield UsageError(
            f"the backend gloo can't send tensors of a GPU as --compress {compress.method} does.",
            cause="it has neither all_to_all nor all_gather of them",
            hint="leave --train.backend out, or --compress powersgd",
        )
    if settings.train.precision == "fp16" and compress.has_memory:
        yield UsageError(
            f"fp16 with --compress {compress.method} can't be had.",
            cause="what is held back would be in units of a loss scale that has changed since",
            hint="--train.precision bf16, which needs no scale",
        )
