"""Flat byte buffers for the weights and gradients sent between workers and servers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64
ABSENT, DENSE = -2, -1
Shape = tuple[tuple[int, ...], torch.dtype]


class FlatLayout:
    """The layout of tensors of given shapes and types in one byte buffer, each aligned to 64 bytes."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        self._shapes = list(shapes)
        self._ranges: list[tuple[int, int]] = []
        offset = 0
        for shape, dtype in self._shapes:
            size = torch.Size(shape).numel() * dtype.itemsize
            self._ranges.append((offset, size))
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = offset

    def empty_buffer(self) -> Tensor:
        """Return an empty buffer for all tensors."""
        return torch.empty(self.num_bytes, dtype=torch.uint8)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors as views of a buffer."""
        return [
            buffer[offset : offset + size].view(dtype).view(shape)
            for (offset, size), (shape, dtype) in zip(self._ranges, self._shapes, strict=True)
        ]

    def pack(self, tensors: Sequence[Tensor], *, out: Tensor | None = None) -> Tensor:
        """Copy the tensors into a buffer and return it."""
        buffer = self.empty_buffer() if out is None else out
        for view, tensor in zip(self.views(buffer), tensors, strict=True):
            view.copy_(tensor.detach())
        return buffer


def layout_of(tensors: Sequence[Tensor]) -> FlatLayout:
    """Return the layout of these tensors."""
    return FlatLayout([(tuple(tensor.shape), tensor.dtype) for tensor in tensors])


def kinds_of(gradients: Sequence[Tensor | None]) -> list[int]:
    """Return a code for each gradient: ABSENT, DENSE, or the number of rows of a sparse, coalesced one."""
    return [ABSENT if g is None else int(g.values().shape[0]) if g.is_sparse else DENSE for g in gradients]


def pack_gradients(gradients: Sequence[Tensor | None]) -> Tensor:
    """Pack the gradients that are not None; a sparse one as the indices of its rows, then the rows."""
    parts: list[Tensor] = []
    for gradient in gradients:
        if gradient is not None:
            parts += [gradient.indices(), gradient.values()] if gradient.is_sparse else [gradient]
    return layout_of(parts).pack(parts)


def unpack_gradients(buffer: Tensor, *, kinds: Sequence[int], like: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients in a buffer of `pack_gradients` as views; `like` are the parameters."""
    shapes: list[Shape] = []
    for kind, parameter in zip(kinds, like, strict=True):
        if kind == DENSE:
            shapes.append((tuple(parameter.shape), parameter.dtype))
        elif kind != ABSENT:
            shapes += [((1, kind), torch.int64), ((kind, *parameter.shape[1:]), parameter.dtype)]
    parts = iter(FlatLayout(shapes).views(buffer))
    return [_next_gradient(kind, parameter, parts) for kind, parameter in zip(kinds, like, strict=True)]


def _next_gradient(kind: int, parameter: Tensor, parts: Iterator[Tensor]) -> Tensor | None:
    if kind == ABSENT:
        return None
    if kind == DENSE:
        return next(parts)
    return torch.sparse_coo_tensor(next(parts), next(parts), parameter.shape, is_coalesced=True, check_invariants=True)
