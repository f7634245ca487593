"""Weights and gradients as one row of bytes, which is what is sent."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ALIGNED = 64
ABSENT, DENSE = -2, -1
Shape = tuple[tuple[int, ...], torch.dtype]


class FlatLayout:
    """Tensors of these shapes and types one after another, each where its type may begin."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = list(shapes)
        self._places: list[tuple[int, int]] = []
        place = 0
        for shape, dtype in self._shapes:
            size = torch.Size(shape).numel() * dtype.itemsize
            self._places.append((place, size))
            place += -(-size // _ALIGNED) * _ALIGNED
        self.num_bytes = place

    def row(self) -> Tensor:
        """Room for all of them."""
        return torch.empty(self.num_bytes, dtype=torch.uint8)

    def views(self, row: Tensor) -> list[Tensor]:
        """The tensors that lie in a row."""
        return [
            row[place : place + size].view(dtype).view(shape)
            for (place, size), (shape, dtype) in zip(self._places, self._shapes, strict=True)
        ]

    def packed(self, tensors: Sequence[Tensor], *, into: Tensor | None = None) -> Tensor:
        """A row with these values."""
        row = self.row() if into is None else into
        for view, tensor in zip(self.views(row), tensors, strict=True):
            view.copy_(tensor.detach())
        return row


def flat_of(tensors: Sequence[Tensor]) -> FlatLayout:
    """For tensors like these."""
    return FlatLayout([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])


def kinds_of(gradients: Sequence[Tensor | None]) -> list[int]:
    """Of each whether it is there, and of a sparse one how many rows it has; those must be coalesced."""
    return [ABSENT if g is None else int(g.values().shape[0]) if g.is_sparse else DENSE for g in gradients]


def pack_gradients(gradients: Sequence[Tensor | None]) -> Tensor:
    """Those that are there; of a sparse one the indices of its rows, then the rows."""
    parts: list[Tensor] = []
    for gradient in gradients:
        if gradient is not None:
            parts += [gradient.indices(), gradient.values()] if gradient.is_sparse else [gradient]
    return flat_of(parts).packed(parts)


def unpack_gradients(row: Tensor, *, kinds: Sequence[int], like: Sequence[Tensor]) -> list[Tensor | None]:
    """What `pack_gradients` made, for parameters `like` these; it lies in the row."""
    shapes: list[Shape] = []
    for kind, parameter in zip(kinds, like, strict=True):
        if kind == DENSE:
            shapes.append((tuple(parameter.shape), parameter.dtype))
        elif kind != ABSENT:
            shapes += [((1, kind), torch.int64), ((kind, *parameter.shape[1:]), parameter.dtype)]
    parts = iter(FlatLayout(shapes).views(row))
    return [_unpacked(kind, parameter, parts) for kind, parameter in zip(kinds, like, strict=True)]


def _unpacked(kind: int, parameter: Tensor, parts: Iterator[Tensor]) -> Tensor | None:
    if kind == ABSENT:
        return None
    if kind == DENSE:
        return next(parts)
    return torch.sparse_coo_tensor(next(parts), next(parts), parameter.shape, is_coalesced=True, check_invariants=True)
