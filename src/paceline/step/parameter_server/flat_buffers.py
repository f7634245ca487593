"""Flat byte buffers for the weights and gradients sent between workers and servers."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_ALIGNMENT = 64
ABSENT, DENSE = -2, -1  # see `gradient_codes`
TensorFormat = tuple[tuple[int, ...], torch.dtype]
"""The shape and the dtype of a tensor."""


class FlatLayout:
    """The layout of tensors of the given formats in one byte buffer, each aligned to 64 bytes."""

    def __init__(self, formats: Sequence[TensorFormat]) -> None:
        self._formats = list(formats)
        self._ranges: list[tuple[int, int]] = []  # (offset, size) of each tensor in bytes
        offset = 0
        for shape, dtype in self._formats:
            size = torch.Size(shape).numel() * dtype.itemsize
            self._ranges.append((offset, size))
            offset += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.num_bytes = offset

    def empty_buffer(self) -> Tensor:
        """Return an uninitialised buffer that is large enough for all tensors."""
        return torch.empty(self.num_bytes, dtype=torch.uint8)

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the tensors as views of a buffer."""
        return [
            buffer[offset : offset + size].view(dtype).view(shape)
            for (offset, size), (shape, dtype) in zip(self._ranges, self._formats, strict=True)
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


def gradient_codes(gradients: Sequence[Tensor | None]) -> list[int]:
    """Return a code for each gradient: ABSENT, DENSE, or the number of rows of a sparse, coalesced gradient."""
    return [ABSENT if g is None else int(g.values().shape[0]) if g.is_sparse else DENSE for g in gradients]


def pack_gradients(gradients: Sequence[Tensor | None]) -> Tensor:
    """Pack the gradients that are not None. A sparse gradient becomes the indices of its rows, followed by the rows."""
    tensors: list[Tensor] = []
    for gradient in gradients:
        if gradient is not None:
            tensors += [gradient.indices(), gradient.values()] if gradient.is_sparse else [gradient]
    return layout_of(tensors).pack(tensors)


def unpack_gradients(buffer: Tensor, *, codes: Sequence[int], like: Sequence[Tensor]) -> list[Tensor | None]:
    """Return views of the gradients in a buffer from `pack_gradients`.

    `codes` are the result of `gradient_codes`, and `like` are the parameters.
    """
    formats: list[TensorFormat] = []
    for code, parameter in zip(codes, like, strict=True):
        if code == DENSE:
            formats.append((tuple(parameter.shape), parameter.dtype))
        elif code != ABSENT:
            formats += [((1, code), torch.int64), ((code, *parameter.shape[1:]), parameter.dtype)]
    tensors = iter(FlatLayout(formats).views(buffer))
    return [_next_gradient(code, parameter, tensors) for code, parameter in zip(codes, like, strict=True)]


def _next_gradient(code: int, parameter: Tensor, tensors: Iterator[Tensor]) -> Tensor | None:
    """Return the gradient of this parameter, made of the next zero, one or two of `tensors`."""
    if code == ABSENT:
        return None
    if code == DENSE:
        return next(tensors)
    return torch.sparse_coo_tensor(
        next(tensors), next(tensors), parameter.shape, is_coalesced=True, check_invariants=True
    )
