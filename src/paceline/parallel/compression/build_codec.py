"""Build the reducer that sums compressed gradients over the replicas, and the codec that it uses."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from paceline.comm.process_group import World
from paceline.config.compression import Compression, Method
from paceline.console.formatting import format_size
from paceline.errors import JobError
from paceline.parallel.compression.codecs import Bf16, BlockScaledCodec, Codec
from paceline.parallel.compression.error_feedback_reducer import ErrorFeedbackBucket, ErrorFeedbackReducer
from paceline.parallel.compression.powersgd import LowRankBucket
from paceline.parallel.compression.quantized import QuantizedBucket
from paceline.parallel.compression.topk import TopKBucket
from paceline.parallel.data_parallel.reducer import BucketReducer
from paceline.parallel.module_access.parameters import NamedParameter

_CODECS: Mapping[Method, Callable[[Compression], Codec]] = {
    Method.BF16: lambda compression: Bf16(),
    Method.FP16: lambda compression: BlockScaledCodec(block=compression.block, is_float=True),
    Method.INT8: lambda compression: BlockScaledCodec(block=compression.block, is_float=False),
}
_ERROR_FEEDBACK_BUCKETS: Mapping[Method, Callable[..., ErrorFeedbackBucket]] = {
    Method.TOPK: TopKBucket,
    Method.POWERSGD: LowRankBucket,
}


def build_compressed_reducer(
    compression: Compression, *, named_parameters: Sequence[NamedParameter], world: World
) -> BucketReducer | ErrorFeedbackReducer:
    """Return the reducer of unsharded parameters that compresses gradients.

    `compression` must be on, and there must be several ranks.

    Raises:
        JobError: a parameter is not floating point, so its numbers cannot be rounded or ordered.
    """
    for member in named_parameters:
        if not member.parameter.is_floating_point():
            raise JobError(
                f"--compress {compression.method}: {member.name} is "
                f"{str(member.parameter.dtype).removeprefix('torch.')}.",
                cause="compression rounds and sorts real numbers, but this dtype is not real",
                hint="leave --compress out, or store real and imaginary parts in an extra dimension",
            )
    if compression.has_error_feedback:
        return ErrorFeedbackReducer(
            named_parameters=named_parameters,
            world=world,
            make_bucket=partial(_ERROR_FEEDBACK_BUCKETS[compression.method], compression=compression),
            replica=world.rank,
        )
    return BucketReducer(
        named_parameters=named_parameters,
        world=world,
        make_bucket=partial(QuantizedBucket, codec=build_codec(compression), ranks=world.world_size),
    )


def build_codec(compression: Compression) -> Codec:
    """Return the codec of an elementwise method (bf16, fp16, int8)."""
    return _CODECS[compression.method](compression)


def compression_notes(
    compression: Compression, reducer: object, *, named_parameters: Sequence[NamedParameter], world: World
) -> Iterator[str]:
    """Yield a note on the number of bytes that a rank sends, with and without compression."""
    if not (compression.is_on and isinstance(reducer, BucketReducer | ErrorFeedbackReducer)):
        return
    ranks = world.world_size
    uncompressed_bytes = 2 * (ranks - 1) / ranks * sum(member.parameter.nbytes for member in named_parameters)
    sent_bytes = reducer.sent_bytes(ranks)
    sent, uncompressed = format_size(round(sent_bytes)), format_size(round(uncompressed_bytes))
    yield f"compress: {compression}; each rank sends {sent} of gradients per update, {uncompressed} without"
