"""Units: the groups of gradients that travel together, in one fixed order on every rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import nn

from paceline.comm.process_group import World

LARGE_BYTES = 16 << 20
FIRST_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
PASSING_BYTES = 10 << 20


@dataclass(frozen=True, kw_only=True)
class NamedParameter:
    """A trainable parameter with its FQN and its place in the model's order."""

    index: int
    name: str
    parameter: nn.Parameter


def trainable_parameters(model: nn.Module) -> list[NamedParameter]:
    """The model's trainable parameters, a tied one once, under its first name."""
    found = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [NamedParameter(index=index, name=name, parameter=p) for index, (name, p) in enumerate(found)]


def renumber_parameters(named: Sequence[NamedParameter]) -> list[NamedParameter]:
    """Some of a model's parameters, counted anew."""
    return [NamedParameter(index=index, name=m.name, parameter=m.parameter) for index, m in enumerate(named)]


def make_buckets(named: Sequence[NamedParameter], *, bucket_bytes: int = BUCKET_BYTES) -> list[list[NamedParameter]]:
    """Cut into units, last layers first, since backward finishes them first.

    A large parameter travels alone and is reduced where it lies; the others share buffers of the size that DDP
    has found good: a small first one, so that sending starts early, then few and large ones.
    """
    units: list[list[NamedParameter]] = []
    backwards = list(reversed(named))
    for alone, members in groupby(backwards, key=_travels_alone):
        if alone:
            units += [[member] for member in members]
        else:
            units += _buckets(list(members), started=bool(units), full=bucket_bytes)
    return units


def passing_bytes(world: World) -> int:
    """How full a buffer gets that is made and let go in every step.

    On CPU less, since glibc hands blocks of more than 32 MiB back to the system at every free: every page is then
    cleared anew in every step. Imagined ranks that send over nccl stand for GPUs.
    """
    return PASSING_BYTES if world.device.type == "cpu" and world.backend != "nccl" else BUCKET_BYTES


def _travels_alone(member: NamedParameter) -> tuple[bool, ...]:
    return (True,) if num_bytes(member.parameter) > LARGE_BYTES else ()


def _buckets(members: Sequence[NamedParameter], *, started: bool, full: int) -> list[list[NamedParameter]]:
    buckets: list[list[NamedParameter]] = []
    for _, alike in groupby(members, key=lambda m: (m.parameter.dtype, m.parameter.device)):
        bucket: list[NamedParameter] = []
        size = 0
        for member in alike:
            bucket.append(member)
            size += num_bytes(member.parameter)
            if size >= (full if buckets or started else FIRST_BYTES):
                buckets.append(bucket)
                bucket, size = [], 0
        if bucket:
            buckets.append(bucket)
    return buckets


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of the elements."""
    return tensor.numel() * tensor.element_size()
