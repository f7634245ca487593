"""A one-process reference that compresses as several replicas do, for `--compress`.

It runs the replicas in turn, each with its own error-feedback memory, and compresses one parameter and one block at a
time, as the papers describe it. From the package it uses the numbers that define a method, and the start of a power
iteration, but no code that packs or sends gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config.compression import Compression, Method
from paceline.errors import UsageError
from paceline.parallel.compression.powersgd import first_basis
from paceline.verification.reference.reference import Gradient, Micro, Reference, RunPosition

Tensors = dict[str, Tensor]
_LEAST, _MOST = -126, 127  # exponents of a float32 scale; values below its steps are sent as zero


@dataclass
class State:
    """The error-feedback memory of each replica, and the bases that all replicas share."""

    held: list[Tensors]
    bases: Tensors = field(default_factory=dict)


class CompressedReference(Reference):
    """The one-process run of `replicas` replicas that compress; microbatch i belongs to replica i % `replicas`."""

    def __init__(self, *, how: Compression, replicas: int, **same: Any) -> None:
        super().__init__(**same)
        self._how, self._replicas = how, replicas
        self._state = State(held=[{} for _ in range(replicas)])
        self._after = self._state
        self._shares: list[Tensors] = []
        self._replica = 0

    def with_spec(self, **changes: Any) -> "CompressedReference":
        """Return the same run from its start, with changes to its `ReferenceConfig`."""
        plain = super().with_spec(**changes)
        return CompressedReference(
            how=self._how, replicas=self._replicas, job=plain.job, spec=plain.spec, cast=plain.cast
        )

    def bare(self) -> Reference:
        """Return a reference that compresses nothing."""
        return super().with_spec()

    def gradient(self, at: RunPosition, *, pieces: Sequence[Micro] | None = None, **how: Any) -> Gradient:
        """Return the gradient that every replica ends with; the error-feedback memory changes only with the update."""
        self._shares = [{} for _ in range(self._replicas)]
        found = super().gradient(at, pieces=pieces, **how)
        self._after = State(held=[dict(one) for one in self._state.held], bases=dict(self._state.bases))
        total = {name: self._joined(name, like, found.divisor) for name, like in found.total.items()}
        return replace(found, total=total)

    def update(self, gradient: Any) -> None:
        """Step, and store what was not sent."""
        super().update(gradient)
        self._state = self._after

    def _passes(self, *given: Any) -> Iterator[tuple[int, Any]]:
        for index, terms in super()._passes(*given):
            self._replica = index % self._replicas
            yield index, terms

    def _collect(self, total: Any, part: Any, largest: Any, keep: Any) -> None:
        super()._collect(total, part, largest, keep)
        share = self._shares[self._replica]
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                value = parameter.grad.detach() / self.spec.loss_scale
                share[name] = share[name] + value if name in share else value.clone()

    def _joined(self, name: str, like: Tensor, divisor: float) -> Tensor:
        own = [share.get(name, torch.zeros_like(like)) for share in self._shares]
        own = [value.float() if value.dtype.itemsize < 4 else value for value in own]
        if not self._how.has_memory:
            total = sum((compress_once(value, self._how) for value in own), torch.zeros_like(own[0]))
            return (compress_once(total, self._how) / divisor).to(like.dtype)
        owed = [held.get(name, torch.zeros_like(value)) for held, value in zip(self._state.held, own, strict=True)]
        wanted = [value / divisor + before for value, before in zip(own, owed, strict=True)]
        if self._how.method is Method.TOPK:
            sent = [largest_alone(value, self._how) for value in wanted]
        else:
            sent = self._projected(name, wanted)
        for held, value, gone in zip(self._after.held, wanted, sent, strict=True):
            held[name] = value - gone
        return sum(sent, torch.zeros_like(own[0])).to(like.dtype)

    def _projected(self, name: str, wanted: Sequence[Tensor]) -> list[Tensor]:
        """Return each matrix projected on the joint space that one power iteration of their sum gives."""
        shape = wanted[0].shape
        rows, columns = (shape[0], wanted[0].numel() // shape[0]) if len(shape) > 1 and shape[0] else (1, shape.numel())
        rank = self._how.factor_rank(rows, columns)
        if not rank:
            return list(wanted)
        matrices = [value.reshape(rows, columns) for value in wanted]
        basis = self._state.bases.get(name)
        if basis is None:
            basis = first_basis(name, (columns, rank)).to(matrices[0])
        near_one = basis * 2.0 ** -min(max(np.frexp(basis.abs().max().item())[1], _LEAST), -_LEAST)
        towards = sum((matrix @ near_one for matrix in matrices), torch.zeros(rows, rank).to(matrices[0]))
        axes = torch.linalg.qr(towards).Q
        factors = [matrix.T @ axes for matrix in matrices]
        self._after.bases[name] = sum(factors, torch.zeros_like(basis))
        return [(axes @ factor.T).reshape(shape) for factor in factors]


def refuse_joined(how: Compression, *, buffers: str) -> None:
    """Raise for runs in which one process has no separate gradient of each replica.

    Raises:
        UsageError
    """
    if how.is_on and buffers == "sync_bn":
        raise UsageError(
            f"verify has no verdict on --compress {how.method} with sync_bn.",
            cause="one process runs the replicas' microbatches as one there, so it has no gradient of "
            "each replica to compress",
            hint="--train.buffers fold, or leave --compress out",
        )


def compress_once(value: Tensor, how: Compression) -> Tensor:
    """Return the value as it is after being compressed and sent once."""
    if how.method is Method.BF16:
        return value.bfloat16().to(value.dtype)
    flat, found = value.reshape(-1), []
    for start in range(0, flat.numel(), how.block):
        block = flat[start : start + how.block]
        most = block.abs().max()
        if not bool(torch.isfinite(most)):
            found.append(block * float("nan"))
        elif how.method is Method.FP16:
            scale = 2.0 ** min(max(np.frexp(most.item())[1] - 15, _LEAST), _MOST)
            found.append((block / scale).half().to(value.dtype) * scale)
        else:
            scale = torch.tensor(most.item() / 127.0, dtype=torch.float32).item()
            steps = torch.round(block / scale).clamp(-127.0, 127.0) if scale else torch.zeros_like(block)
            found.append(steps * scale)
    return torch.cat(found).view(value.shape) if found else value


def largest_alone(value: Tensor, how: Compression) -> Tensor:
    """Return the elements of largest magnitude, the first of equal ones, with zeros elsewhere."""
    flat = value.reshape(-1)
    order = np.argsort(-flat.abs().cpu().numpy(), kind="stable")[: how.picked(flat.numel())]
    places = torch.from_numpy(order.copy()).to(value.device)
    kept = torch.zeros_like(flat)
    kept[places] = flat[places]
    return kept.view(value.shape)
