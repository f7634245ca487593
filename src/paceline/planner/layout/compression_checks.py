"""Refuse layouts, update rules and settings that gradient compression cannot be combined with."""

from collections.abc import Iterator

from paceline.config.compression import Compression, Method
from paceline.config.layout import Layout, LayoutKind
from paceline.config.settings import Settings
from paceline.config.update_rule import UpdateRule
from paceline.errors import LayoutError, PacelineError, UsageError
from paceline.planner.layout.mesh import Mesh, resolve_mesh

_SHARDED_REASON = "most of the traffic of a sharded layout is parameters, which are not compressed"
_SPLIT_MODEL_REASON = "most of the traffic between these ranks is activations or partial sums, which are not compressed"
_THREADS_REASON = "replicas as threads share memory and send nothing"


def refuse_compression(
    compress: Compression, update: UpdateRule, layout: Layout, *, ranks: int, settings: Settings | None
) -> list[PacelineError]:
    """Return the errors of `refuse_compressed_layout` and, with `settings`, of `refuse_compressed_settings`."""
    errors = refuse_compressed_layout(compress, update, layout, resolve_mesh(layout, ranks=ranks, problems=[]))
    return [*errors, *(refuse_compressed_settings(compress, settings) if settings is not None else ())]


def refuse_compressed_layout(
    compress: Compression, update: UpdateRule, layout: Layout, mesh: Mesh
) -> list[PacelineError]:
    """Return an error for each reason why compression does not support the layout or the update rule.

    Compression works between synchronous replicas that hold the whole model.
    """
    if not compress.is_on:
        return []
    errors: list[PacelineError] = []
    other_axes = [axis for axis in mesh.split_axes if axis != "dp_replicate"]
    uses_threads = layout.kind is LayoutKind.THREADS
    if other_axes or uses_threads:
        is_sharded = "dp_shard" in other_axes
        command = f"--layout ddp --ranks {mesh.ranks} --compress {compress}"
        errors.append(
            LayoutError(
                f"--compress {compress.method} needs ddp, not {layout}.",
                cause=_THREADS_REASON if uses_threads else _SHARDED_REASON if is_sharded else _SPLIT_MODEL_REASON,
                hint=f"{command}, or --layout fsdp,params=bf16" if is_sharded and mesh.zero == 3 else command,
            )
        )
    elif mesh.ranks == 1:
        errors.append(
            LayoutError(
                f"--compress {compress.method} with one rank: it sends nothing.",
                cause="gradients are compressed only when replicas send them to each other",
                hint=f"--ranks 2 --compress {compress}, or leave --compress out",
            )
        )
    if not update.is_synchronous:
        errors.append(
            LayoutError(
                f"--compress {compress.method} needs --update sync, not {update}.",
                cause="compression changes how a step's gradients are reduced; this update rule does not reduce any",
                hint=f"--update sync --compress {compress}",
            )
        )
    return errors


def refuse_compressed_settings(
    compress: Compression, settings: Settings, *, backend: str = ""
) -> Iterator[PacelineError]:
    """Yield an error for each setting that compression does not support.

    `backend` is the name of the backend if the ranks use GPUs, else empty.
    """
    if not compress.is_on:
        return
    if settings.train.exact:
        yield UsageError(
            f"--train.exact with --compress {compress.method} is not supported.",
            cause="exact mode sums uncompressed gradients, so that the number of ranks does not change the result",
            hint="leave --train.exact or --compress out",
        )
    if backend == "gloo" and compress.method is not Method.POWERSGD:
        yield UsageError(
            f"the gloo backend can't send GPU tensors as --compress {compress.method} does.",
            cause="it has neither all_to_all nor all_gather for GPU tensors",
            hint="leave --train.backend out, or --compress powersgd",
        )
    if settings.train.precision == "fp16" and compress.has_error_feedback:
        yield UsageError(
            f"fp16 with --compress {compress.method} is not supported.",
            cause="the error feedback would be in units of an old loss scale",
            hint="--train.precision bf16, which needs no loss scale",
        )
