"""The reducer of replicas that compress what they send."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from paceline.errors import JobError
from paceline.place.compress.dense import DenseUnit
from paceline.place.compress.grain import Bf16, Grain, Scaled
from paceline.place.compress.held import HeldReducer, HeldUnit
from paceline.place.compress.low_rank import LowRankUnit
from paceline.place.compress.sparse import TopKUnit
from paceline.place.replicate import BucketReducer
from paceline.place.units import Named, num_bytes
from paceline.spec.compress import Compress, Method
from paceline.spec.words import size
from paceline.world import World

_GRAINS: Mapping[Method, Callable[[Compress], Grain]] = {
    Method.BF16: lambda how: Bf16(),
    Method.FP16: lambda how: Scaled(block=how.block, is_float=True),
    Method.INT8: lambda how: Scaled(block=how.block, is_float=False),
}
_HELD: Mapping[Method, Callable[..., HeldUnit]] = {Method.TOPK: TopKUnit, Method.POWERSGD: LowRankUnit}


def compressed_reducer(how: Compress, *, named: Sequence[Named], world: World) -> BucketReducer | HeldReducer:
    """What adds the gradients of whole parameters so. `how` is on, and there are several ranks.

    Raises:
        JobError: a parameter's numbers are none that can be rounded or ordered.
    """
    for member in named:
        if not member.parameter.is_floating_point():
            raise JobError(
                f"--compress {how.method}: {member.name} is {str(member.parameter.dtype).removeprefix('torch.')}.",
                cause="real numbers are rounded and put in the order of their sizes, these are not real",
                hint="leave --compress out, or keep real and imaginary parts as a parameter of one dimension more",
            )
    if how.has_memory:
        return HeldReducer(named=named, world=world, unit=partial(_HELD[how.method], how=how), replica=world.rank)
    return BucketReducer(named=named, world=world, unit=partial(DenseUnit, grain=grain_of(how), ranks=world.world_size))


def grain_of(how: Compress) -> Grain:
    """How a method that sends every number packs them."""
    return _GRAINS[how.method](how)


def told(how: Compress, reducer: object, *, named: Sequence[Named], world: World) -> Iterator[str]:
    """A line about bytes, with and without."""
    if not (how.is_on and isinstance(reducer, BucketReducer | HeldReducer)):
        return
    ranks = world.world_size
    plain = 2 * (ranks - 1) / ranks * sum(num_bytes(member.parameter) for member in named)
    sent = reducer.sent_bytes(ranks)
    yield f"compress: {how}; each rank sends {size(round(sent))} of gradients an update, {size(round(plain))} without"
