"""Compress gradients to low rank by one step of a power iteration (Vogels et al., "PowerSGD", 2019).

The matrix of a gradient is sent as two thin factors, left and right. The right factor is the basis of the next step.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.config.compression import Compression
from paceline.parallel.compression.residual_memory import DoubleBufferedTensors, accumulation_dtype
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.torch_internals.rng import stream_key

_MAX_EXPONENT = 126  # float32 represents 2^126 and 2^-126


class LowRankBucket:
    """A bucket of low-rank gradients. Gradients of vectors, and those too small to compress, are sent unchanged."""

    def __init__(self, members: Sequence[NamedParameter], *, compression: Compression) -> None:
        first = members[0].parameter
        self._dtype, self._device = accumulation_dtype(first.dtype), first.device
        factor_ranks = {m.name: compression.factor_rank(*_matrix_shape(m.parameter)) for m in members}  # 0: unchanged
        self._compressed = [m for m in members if factor_ranks[m.name]]
        self._uncompressed = [m for m in members if not factor_ranks[m.name]]
        shapes = {m.name: _matrix_shape(m.parameter) for m in self._compressed}
        self.residuals = DoubleBufferedTensors(shapes, dtype=self._dtype, device=self._device)
        basis_shapes = {name: (columns, factor_ranks[name]) for name, (_, columns) in shapes.items()}
        self.basis = DoubleBufferedTensors(basis_shapes, dtype=self._dtype, device=self._device)
        for name, tensor in self.basis.current.items():
            tensor.copy_(make_first_basis(name, tensor.shape))
        self._left_shapes = [(rows, factor_ranks[name]) for name, (rows, _) in shapes.items()]
        self._first_message = self._second_message = torch.zeros(0, dtype=self._dtype, device=self._device)
        self._left_factors: list[Tensor] = []
        self._world: World | None = None
        self._wait: Callable[[], object] | None = None

    @property
    def persistent_buffers(self) -> tuple[DoubleBufferedTensors, ...]:
        """Return the buffers that persist from step to step: residuals and bases."""
        return self.residuals, self.basis

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that a rank sends for this bucket."""
        numel = self._num_uncompressed() + sum(rows * rank for rows, rank in self._left_shapes)
        numel += sum(tensor.numel() for tensor in self.basis.current.values())
        return 2 * (ranks - 1) / ranks * numel * self._dtype.itemsize

    def launch(self, world: World) -> None:
        """Start to sum the product of each matrix and its basis, and the uncompressed gradients, over all ranks."""
        self._world = world
        self.residuals.add_gradients([_gradient(m).reshape(_matrix_shape(m.parameter)) for m in self._compressed])
        messages = [_gradient(m).reshape(-1).to(self._dtype) for m in self._uncompressed]
        matrices_and_bases = zip(self.residuals.next.values(), self.basis.current.values(), strict=True)
        messages += [(matrix @ scale_near_one(basis)).view(-1) for matrix, basis in matrices_and_bases]
        self._first_message = torch.cat(messages)
        self._wait = world.start_all_reduce(self._first_message)

    def start_second_message(self) -> None:
        """Orthonormalize each product to the left factor, start to sum the right factors, and store the residuals."""
        assert self._wait is not None and self._world is not None
        self._wait()
        self._wait = None
        if not self._compressed:
            return
        columns = self._first_message[self._num_uncompressed() :].split(
            [rows * rank for rows, rank in self._left_shapes]
        )
        self._left_factors = [
            torch.linalg.qr(column.view(shape)).Q for column, shape in zip(columns, self._left_shapes, strict=True)
        ]
        projections = []
        for matrix, left_factor in zip(self.residuals.next.values(), self._left_factors, strict=True):
            projections.append(matrix.T @ left_factor)
            matrix.sub_(left_factor @ projections[-1].T)
        self._second_message = torch.cat([projection.reshape(-1) for projection in projections])
        self._wait = self._world.start_all_reduce(self._second_message)

    def finish(self) -> Tensor:
        """Write the product of the factors to each `.grad`; return a number that is finite if all gradients are."""
        if self._wait is not None:
            self._wait()
            self.basis.next_flat.copy_(self._second_message)
        values = list(
            self._first_message[: self._num_uncompressed()].split([m.parameter.numel() for m in self._uncompressed])
        )
        factors = zip(self._left_factors, self.basis.next.values(), strict=True)
        values += [left_factor @ basis.T for left_factor, basis in factors]
        for member, value in zip([*self._uncompressed, *self._compressed], values, strict=True):
            member.parameter.grad = value.view(member.parameter.shape).to(member.parameter.dtype)
        return torch.stack([value.sum(dtype=torch.float64) for value in values]).sum()

    def _num_uncompressed(self) -> int:
        return sum(member.parameter.numel() for member in self._uncompressed)


def make_first_basis(name: str, shape: Sequence[int]) -> Tensor:
    """Return the basis of the first step, which is equal on every rank and in every run."""
    generator = torch.Generator().manual_seed(stream_key("powersgd", name))
    return torch.randn(*shape, generator=generator)


def scale_near_one(basis: Tensor) -> Tensor:
    """Scale a basis by a power of two so that its largest element is near 1.

    A basis has the magnitude of gradients, whose squares may overflow or underflow.
    """
    exponent = torch.frexp(basis.abs().amax()).exponent
    return torch.ldexp(basis, -exponent.clamp(-_MAX_EXPONENT, _MAX_EXPONENT))


def _matrix_shape(parameter: Tensor) -> tuple[int, int]:
    """Return the number of rows and columns of a parameter as a matrix.

    The rows are the first dimension, and the columns are all other dimensions together. A vector is a single row.
    """
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    return rows, parameter.numel() // rows if rows else 0


def _gradient(member: NamedParameter) -> Tensor:
    grad = member.parameter.grad
    return torch.zeros_like(member.parameter) if grad is None else grad
