"""List the trainable parameters, and group them into buckets, whose gradients are sent together.

The buckets have the same order on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from torch import nn

from paceline.comm.process_group import World
from paceline.planner.layout.bucket_sizes import (
    BUCKET_BYTES,
    FIRST_BUCKET_BYTES,
    LARGE_PARAMETER_BYTES,
    TRANSIENT_BUCKET_BYTES,
)


@dataclass(frozen=True, kw_only=True)
class NamedParameter:
    """A trainable parameter with its FQN and its position in the model's order."""

    index: int
    name: str
    parameter: nn.Parameter


def trainable_parameters(model: nn.Module) -> list[NamedParameter]:
    """Return the model's trainable parameters; a tied parameter appears once, under its first name."""
    parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [NamedParameter(index=index, name=name, parameter=p) for index, (name, p) in enumerate(parameters)]


def renumber_parameters(named_parameters: Sequence[NamedParameter]) -> list[NamedParameter]:
    """Return the parameters with `index` counted from 0."""
    return [NamedParameter(index=index, name=m.name, parameter=m.parameter) for index, m in enumerate(named_parameters)]


def make_buckets(
    named_parameters: Sequence[NamedParameter], *, bucket_bytes: int = BUCKET_BYTES
) -> list[list[NamedParameter]]:
    """Group parameters into buckets, last layers first, since backward computes their gradients first.

    A large parameter gets a separate bucket and is reduced in place. The others share buckets of DDP's default sizes: a
    small first bucket, so that communication starts early, then larger buckets.
    """
    buckets: list[list[NamedParameter]] = []
    backwards = list(reversed(named_parameters))
    for is_large, members in groupby(backwards, key=_needs_own_bucket):
        if is_large:
            buckets += [[member] for member in members]
        else:
            buckets += _group_by_size(list(members), has_earlier_bucket=bool(buckets), bucket_bytes=bucket_bytes)
    return buckets


def transient_bucket_bytes(world: World) -> int:
    """Return the bucket size in bytes for buffers that are allocated and freed in every step.

    It is smaller on a CPU, since glibc returns blocks of more than 32 MiB to the system at every free, and the system
    then has to clear all pages in every step. Simulated ranks with the nccl backend count as GPUs.
    """
    return TRANSIENT_BUCKET_BYTES if world.device.type == "cpu" and world.backend != "nccl" else BUCKET_BYTES


def _needs_own_bucket(member: NamedParameter) -> bool:
    return member.parameter.nbytes > LARGE_PARAMETER_BYTES


def _group_by_size(
    members: Sequence[NamedParameter], *, has_earlier_bucket: bool, bucket_bytes: int
) -> list[list[NamedParameter]]:
    buckets: list[list[NamedParameter]] = []
    for _, similar_members in groupby(members, key=lambda m: (m.parameter.dtype, m.parameter.device)):
        bucket: list[NamedParameter] = []
        size = 0
        for member in similar_members:
            bucket.append(member)
            size += member.parameter.nbytes
            if size >= (bucket_bytes if buckets or has_earlier_bucket else FIRST_BUCKET_BYTES):
                buckets.append(bucket)
                bucket, size = [], 0
        if bucket:
            buckets.append(bucket)
    return buckets
