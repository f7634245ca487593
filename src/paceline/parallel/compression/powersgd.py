"""Low-rank compression of gradients by one step of a power iteration (Vogels et al., "PowerSGD", 2019)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.process_group import World
from paceline.config.compression import Compression
from paceline.parallel.compression.residual_memory import ResidualBuffers, accumulation_dtype
from paceline.parallel.module_access.parameters import NamedParameter
from paceline.torch_internals.rng import stream_key

_MOST = 126  # float32 represents 2^126 and 2^-126


class LowRankBucket:
    """A bucket of low-rank gradients. Gradients of vectors, and those too small to compress, are sent unchanged."""

    def __init__(self, members: Sequence[NamedParameter], *, how: Compression) -> None:
        first = members[0].parameter
        self._dtype, self._device = accumulation_dtype(first.dtype), first.device
        ranks = {m.name: how.factor_rank(*_sides(m.parameter)) for m in members}
        self._thin = [m for m in members if ranks[m.name]]
        self._rest = [m for m in members if not ranks[m.name]]
        shapes = {m.name: _sides(m.parameter) for m in self._thin}
        self.errors = ResidualBuffers(shapes, dtype=self._dtype, device=self._device)
        bases = {name: (columns, ranks[name]) for name, (_, columns) in shapes.items()}
        self.basis = ResidualBuffers(bases, dtype=self._dtype, device=self._device)
        for name, tensor in self.basis.now.items():
            tensor.copy_(first_basis(name, tensor.shape))
        self._left = [(rows, ranks[name]) for name, (rows, _) in shapes.items()]
        self._first = self._second = torch.zeros(0, dtype=self._dtype, device=self._device)
        self._axes: list[Tensor] = []
        self._world: World | None = None
        self._wait: Callable[[], object] | None = None

    @property
    def memories(self) -> tuple[ResidualBuffers, ...]:
        """Return the buffers that persist from step to step: residuals and bases."""
        return self.errors, self.basis

    def sent_bytes(self, ranks: int) -> float:
        """Return the bytes that a rank sends for this bucket."""
        numbers = sum(m.parameter.numel() for m in self._rest) + sum(rows * rank for rows, rank in self._left)
        numbers += sum(tensor.numel() for tensor in self.basis.now.values())
        return 2 * (ranks - 1) / ranks * numbers * self._dtype.itemsize

    def launch(self, world: World) -> None:
        """Send each matrix times its basis, and the uncompressed gradients."""
        self._world = world
        self.errors.corrected([_gradient(m).reshape(_sides(m.parameter)) for m in self._thin])
        parts = [_gradient(m).reshape(-1).to(self._dtype) for m in self._rest]
        products = zip(self.errors.next.values(), self.basis.now.values(), strict=True)
        parts += [(matrix @ near_one(basis)).view(-1) for matrix, basis in products]
        self._first = torch.cat(parts)
        self._wait = world.start_all_reduce(self._first)

    def pass_on(self) -> None:
        """Orthonormalize the summed columns, send each matrix's projection onto them, and store the residual."""
        assert self._wait is not None and self._world is not None
        self._wait()
        self._wait = None
        if not self._thin:
            return
        columns = self._first[self._num_rest() :].split([rows * rank for rows, rank in self._left])
        self._axes = [torch.linalg.qr(c.view(side)).Q for c, side in zip(columns, self._left, strict=True)]
        along = []
        for matrix, axes in zip(self.errors.next.values(), self._axes, strict=True):
            along.append(matrix.T @ axes)
            matrix.sub_(axes @ along[-1].T)
        self._second = torch.cat([one.reshape(-1) for one in along])
        self._wait = self._world.start_all_reduce(self._second)

    def land(self) -> Tensor:
        """Multiply the factors into `.grad`, and return a number that is finite if every gradient is."""
        if self._wait is not None:
            self._wait()
            self.basis.next_flat.copy_(self._second)
        values = list(self._first[: self._num_rest()].split([m.parameter.numel() for m in self._rest]))
        values += [axes @ basis.T for axes, basis in zip(self._axes, self.basis.next.values(), strict=True)]
        for member, value in zip([*self._rest, *self._thin], values, strict=True):
            member.parameter.grad = value.view(member.parameter.shape).to(member.parameter.dtype)
        return torch.stack([value.sum(dtype=torch.float64) for value in values]).sum()

    def _num_rest(self) -> int:
        return sum(member.parameter.numel() for member in self._rest)


def first_basis(name: str, shape: Sequence[int]) -> Tensor:
    """Return the basis of the first step: the same on every rank and in every run."""
    generator = torch.Generator().manual_seed(stream_key("powersgd", name))
    return torch.randn(*shape, generator=generator)


def near_one(basis: Tensor) -> Tensor:
    """Scale a basis by a power of two so that its largest element is near 1.

    A basis has the magnitude of gradients, whose squares may overflow or underflow.
    """
    exponent = torch.frexp(basis.abs().amax()).exponent
    return torch.ldexp(basis, -exponent.clamp(-_MOST, _MOST))


def _sides(parameter: Tensor) -> tuple[int, int]:
    """Return the rows and columns of a parameter as a matrix: its first dimension, and all others."""
    rows = parameter.shape[0] if parameter.dim() > 1 else 1
    return rows, parameter.numel() // rows if rows else 0


def _gradient(member: NamedParameter) -> Tensor:
    grad = member.parameter.grad
    return torch.zeros_like(member.parameter) if grad is None else grad
