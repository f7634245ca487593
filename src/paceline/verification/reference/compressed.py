"""A one-process reference that compresses as several replicas do, for `--compress`.

It runs the replicas in turn, each with its own error-feedback memory, and compresses one parameter and one block at a
time, as the papers describe it. It shares with the package the parameters of each method and the initial basis of the
power iteration, but no code that packs or sends gradients.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from paceline.config.compression import Compression, Method
from paceline.errors import UsageError
from paceline.parallel.compression.powersgd import make_first_basis
from paceline.verification.reference.reference import Reference, ReferenceGradient, ReferenceMicrobatch, RunPosition

Tensors = dict[str, Tensor]
_MIN_EXPONENT, _MAX_EXPONENT = -126, 127  # limits of the exponent of a scale, which is a float32


@dataclass
class CompressionState:
    """The error-feedback memory of each replica and, for PowerSGD, the bases that all replicas share."""

    errors: list[Tensors]
    bases: Tensors = field(default_factory=dict)


class CompressedReference(Reference):
    """The one-process run of replicas that compress their gradients; microbatch i belongs to replica i % `replicas`."""

    def __init__(self, *, compression: Compression, replicas: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._compression, self._replicas = compression, replicas
        self._state = CompressionState(errors=[{} for _ in range(replicas)])
        self._next_state = self._state  # the state after `update`
        self._replica_gradients: list[Tensors] = []
        self._replica = 0  # the replica of the microbatch that is run

    @override
    def with_config(self, **changes: Any) -> "CompressedReference":
        """Return a new reference at the start of the run, with these changes to its `ReferenceConfig`."""
        reference = super().with_config(**changes)
        return CompressedReference(
            compression=self._compression,
            replicas=self._replicas,
            job=reference.job,
            config=reference.config,
            cast=reference.cast,
        )

    @override
    def without_compression(self) -> Reference:
        """Return a new reference that does not compress its gradients."""
        return super().with_config()

    @override
    def compute_gradient(
        self, position: RunPosition, *, microbatches: Sequence[ReferenceMicrobatch] | None = None, **options: Any
    ) -> ReferenceGradient:
        """Return the decompressed sum that every replica receives. Only `update` changes the error feedback."""
        self._replica_gradients = [{} for _ in range(self._replicas)]
        uncompressed = super().compute_gradient(position, microbatches=microbatches, **options)
        self._next_state = CompressionState(
            errors=[dict(replica_errors) for replica_errors in self._state.errors], bases=dict(self._state.bases)
        )
        total = {
            name: self._combine_replicas(name, like, uncompressed.divisor) for name, like in uncompressed.total.items()
        }
        return replace(uncompressed, total=total)

    @override
    def update(self, gradient: Any) -> None:
        """Step the optimizers, and store the error feedback of this step."""
        super().update(gradient)
        self._state = self._next_state

    @override
    def _run_passes(self, *arguments: Any) -> Iterator[tuple[int, Any]]:
        for index, terms in super()._run_passes(*arguments):
            self._replica = index % self._replicas
            yield index, terms

    @override
    def _accumulate(self, total: Any, contribution: Any, max_abs: Any, keep_contributions: Any) -> None:
        super()._accumulate(total, contribution, max_abs, keep_contributions)
        replica_gradient = self._replica_gradients[self._replica]
        for name, parameter in self.model.named_parameters():
            if parameter.grad is not None:
                value = parameter.grad.detach() / self.config.loss_scale
                replica_gradient[name] = replica_gradient[name] + value if name in replica_gradient else value.clone()

    def _combine_replicas(self, name: str, like: Tensor, divisor: float) -> Tensor:
        """Return one parameter's gradient as every replica receives it: the sum of compressed gradients."""
        gradients = [tensors.get(name, torch.zeros_like(like)) for tensors in self._replica_gradients]
        gradients = [value.float() if value.dtype.itemsize < 4 else value for value in gradients]
        if not self._compression.has_error_feedback:
            total = sum(
                (compress_once(value, self._compression) for value in gradients), torch.zeros_like(gradients[0])
            )
            return (compress_once(total, self._compression) / divisor).to(like.dtype)
        errors = [
            replica_errors.get(name, torch.zeros_like(value))
            for replica_errors, value in zip(self._state.errors, gradients, strict=True)
        ]
        corrected = [value / divisor + error for value, error in zip(gradients, errors, strict=True)]
        if self._compression.method is Method.TOPK:
            sent = [keep_largest(value, self._compression) for value in corrected]
        else:
            sent = self._project_low_rank(name, corrected)
        for replica_errors, value, sent_value in zip(self._next_state.errors, corrected, sent, strict=True):
            replica_errors[name] = value - sent_value
        return sum(sent, torch.zeros_like(gradients[0])).to(like.dtype)

    def _project_low_rank(self, name: str, gradients: Sequence[Tensor]) -> list[Tensor]:
        """Return each gradient matrix projected on the column space that one power iteration of their sum gives."""
        shape = gradients[0].shape
        rows, columns = (
            (shape[0], gradients[0].numel() // shape[0]) if len(shape) > 1 and shape[0] else (1, shape.numel())
        )
        rank = self._compression.factor_rank(rows, columns)
        if not rank:
            return list(gradients)
        matrices = [value.reshape(rows, columns) for value in gradients]
        basis = self._state.bases.get(name)
        if basis is None:
            basis = make_first_basis(name, (columns, rank)).to(matrices[0])
        scaled_basis = basis * 2.0 ** -min(max(np.frexp(basis.abs().max().item())[1], _MIN_EXPONENT), -_MIN_EXPONENT)
        column_space = sum((matrix @ scaled_basis for matrix in matrices), torch.zeros(rows, rank).to(matrices[0]))
        orthonormal = torch.linalg.qr(column_space).Q
        factors = [matrix.T @ orthonormal for matrix in matrices]
        self._next_state.bases[name] = sum(factors, torch.zeros_like(basis))
        return [(orthonormal @ factor.T).reshape(shape) for factor in factors]


def refuse_compression_with_sync_bn(compression: Compression, *, buffers: str) -> None:
    """Raise if gradients are compressed under sync_bn: one process then has no separate gradient of each replica.

    Raises:
        UsageError
    """
    if compression.is_on and buffers == "sync_bn":
        raise UsageError(
            f"verify has no verdict on --compress {compression.method} with sync_bn.",
            cause="with sync_bn, one process runs the replicas' microbatches as one, so it has no gradient of "
            "each replica to compress",
            hint="--train.buffers fold, or leave --compress out",
        )


def compress_once(value: Tensor, compression: Compression) -> Tensor:
    """Return the value after one compression and decompression."""
    if compression.method is Method.BF16:
        return value.bfloat16().to(value.dtype)
    flat, blocks = value.reshape(-1), []
    for start in range(0, flat.numel(), compression.block):
        block = flat[start : start + compression.block]
        max_abs = block.abs().max()
        if not bool(torch.isfinite(max_abs)):
            blocks.append(block * float("nan"))
        elif compression.method is Method.FP16:
            scale = 2.0 ** min(max(np.frexp(max_abs.item())[1] - 15, _MIN_EXPONENT), _MAX_EXPONENT)
            blocks.append((block / scale).half().to(value.dtype) * scale)
        else:
            scale = torch.tensor(max_abs.item() / 127.0, dtype=torch.float32).item()
            steps = torch.round(block / scale).clamp(-127.0, 127.0) if scale else torch.zeros_like(block)
            blocks.append(steps * scale)
    return torch.cat(blocks).view(value.shape) if blocks else value


def keep_largest(value: Tensor, compression: Compression) -> Tensor:
    """Return the tensor with only its largest elements (of equal ones, the first); the others are set to zero."""
    flat = value.reshape(-1)
    indices = np.argsort(-flat.abs().cpu().numpy(), kind="stable")[: compression.num_selected(flat.numel())]
    positions = torch.from_numpy(indices.copy()).to(value.device)
    selected = torch.zeros_like(flat)
    selected[positions] = flat[positions]
    return selected.view(value.shape)
