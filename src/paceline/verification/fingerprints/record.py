"""`pl.record`: write fingerprints of each step of any training loop, with two added lines."""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.data.stream.iterable_loader import checksum
from paceline.errors import UsageError
from paceline.launch.inherited_environment import own_rank
from paceline.verification.fingerprints.fingerprint import (
    FLOAT32_EPS,
    Fingerprint,
    digest_bits,
    max_rounding,
    projection_signs,
)

_WRAPPER_NAMES = ("_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
Optimizers = Optimizer | Iterable[Optimizer]


class Recorder:
    """A writer of one line for each optimizer step: fingerprints of the gradients before and the weights after it."""

    def __init__(self, model: nn.Module, optimizer: Optimizers, path: str | Path, *, every: int = 1) -> None:
        if every < 1:
            raise UsageError(f"record(every={every}): expected 1 or more.", hint="every=10 records every tenth step")
        optimizers = _unwrap_optimizers(optimizer)
        rank = _rank()
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self._handle = os.open(folder / f"rank-{rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        self._model = model
        self._every = every
        self._batch: int | None = None
        self._eps = FLOAT32_EPS
        self._precision_hook = model.register_forward_pre_hook(self._record_precision)
        self._optimizer_hooks = [
            _OptimizerHooks(self, index, torch_optimizer, optimizers)
            for index, torch_optimizer in enumerate(optimizers)
        ]

    def batch(self, batch: Any) -> None:
        """Record a checksum of the batch that this rank trains on next, so that the data order is compared too."""
        self._batch = checksum(batch, self._batch or 0)

    def close(self) -> None:
        """Remove the hooks and close the file; a second call does nothing."""
        self._precision_hook.remove()
        for hooks in self._optimizer_hooks:
            hooks.remove()
        if self._optimizer_hooks:
            os.close(self._handle)
        self._optimizer_hooks = []

    def _record_precision(self, *_: object) -> None:
        """Store the machine epsilon of the autocast type, because it gives the rounding of the gradients."""
        dtypes = [torch.get_autocast_dtype(device) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
        self._eps = max([FLOAT32_EPS, *(torch.finfo(dtype).eps for dtype in dtypes)])

    def fingerprint_gradient(self, gradient: Tensor) -> Fingerprint:
        """Return the fingerprint of a gradient, with the machine epsilon of the forward that it came from."""
        return fingerprint_tensor(gradient, eps=self._eps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def is_due(self, step: int) -> bool:
        """Return True if this step is recorded."""
        return (step - 1) % self._every == 0

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the currently trainable parameters. Unfreezing and wrappers may change them."""
        return [(strip_wrapper_names(name), p) for name, p in self._model.named_parameters() if p.requires_grad]

    def write(
        self, step: int, optimizer_index: int, gradients: Mapping[str, Fingerprint], weights: Mapping[str, Fingerprint]
    ) -> None:
        """Append one line with a single write."""
        line: dict[str, Any] = {"step": step, "batch": self._batch if step else None}
        if optimizer_index:
            line["optimizer"] = optimizer_index
        line |= {"gradients": _encode_fingerprints(gradients), "weights": _encode_fingerprints(weights)}
        os.write(self._handle, (json.dumps(line) + "\n").encode())
        if step:
            self._batch = None


class _OptimizerHooks:
    """The hooks that record one optimizer's parameters; those of optimizer 0 also record unassigned parameters."""

    def __init__(
        self, recorder: Recorder, optimizer_index: int, optimizer: Optimizer, all_optimizers: list[Optimizer]
    ) -> None:
        self._recorder, self._optimizer_index, self._step = recorder, optimizer_index, 0
        self._optimizer = optimizer
        self._other_optimizers = [other for other in all_optimizers if other is not optimizer]
        self._gradients: dict[str, Fingerprint] = {}
        self._hooks = (
            optimizer.register_step_pre_hook(self._before_step),
            optimizer.register_step_post_hook(self._after_step),
        )

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before_step(self, _: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Record the gradients before the step; with a closure (Lightning, LBFGS), only after the closure has run."""
        if self._step == 0:
            self._write_step()
        self._step += 1
        if not self._recorder.is_due(self._step):
            return None
        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": partial(self._run_closure, kwargs["closure"])}
        if len(args) > 1 and callable(args[1]):
            return (args[0], partial(self._run_closure, args[1]), *args[2:]), kwargs
        self._record_gradients()
        return None

    def _run_closure(self, closure: Callable[[], Any]) -> Any:
        result = closure()
        self._record_gradients()
        return result

    def _record_gradients(self) -> None:
        self._gradients = {
            name: self._recorder.fingerprint_gradient(p.grad)
            for name, p in self._assigned_parameters()
            if p.grad is not None
        }

    def _after_step(self, *_: object) -> None:
        if self._recorder.is_due(self._step):
            self._write_step()
        self._gradients = {}

    def _write_step(self) -> None:
        """Write one record; step 0 holds the weights before the first step."""
        weights = {name: fingerprint_tensor(p) for name, p in self._assigned_parameters()}
        self._recorder.write(self._step, self._optimizer_index, self._gradients, weights)

    def _assigned_parameters(self) -> list[tuple[str, nn.Parameter]]:
        own_ids, other_ids = _parameter_ids([self._optimizer]), _parameter_ids(self._other_optimizers)
        takes_unassigned = self._optimizer_index == 0
        return [
            (n, p)
            for n, p in self._recorder.trainable_parameters()
            if id(p) in own_ids or (takes_unassigned and id(p) not in other_ids)
        ]


def record(model: nn.Module, optimizer: Optimizers, path: str | Path, *, every: int = 1) -> Recorder:
    """Write fingerprints of every step of any loop to the folder `path`; compare with `paceline compare A B`.

    `optimizer` is one or several; they may be wrapped by Accelerate or Lightning.
    """
    return Recorder(model, optimizer, path, every=every)


def _unwrap_optimizers(optimizer: Any) -> list[Optimizer]:
    """Return the torch optimizers inside wrapped ones."""
    if isinstance(optimizer, list | tuple):
        return [inner for wrapped in optimizer for inner in _unwrap_optimizers(wrapped)]
    inner = optimizer
    while isinstance(getattr(inner, "optimizer", None), Optimizer) and inner.optimizer is not inner:
        inner = inner.optimizer
    if not isinstance(inner, Optimizer):
        raise UsageError(
            f"record needs an optimizer, got a {type(optimizer).__name__}.",
            cause="fingerprints are taken at its steps",
            hint="pl.record(model, optimizer, path), or a list of optimizers",
        )
    return [inner]


def _parameter_ids(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return int(torch.distributed.get_rank())
    return own_rank(os.environ)


def fingerprint_tensor(tensor: Tensor, *, eps: float = FLOAT32_EPS) -> Fingerprint:
    """Return the fingerprint of a tensor on any device. A sharded tensor is gathered, so all its ranks must call this.

    The fingerprint's machine epsilon is the larger of `eps` and the epsilon of the tensor's type.
    """
    full_tensor: Any = tensor.detach()
    if hasattr(full_tensor, "full_tensor"):
        full_tensor = full_tensor.full_tensor()
    if full_tensor.layout != torch.strided:
        full_tensor = full_tensor.to_dense()
    if full_tensor.is_complex():
        full_tensor = torch.view_as_real(full_tensor)
    flat = full_tensor.cpu().contiguous().reshape(-1)
    raw: Any = flat.view(torch.uint8).numpy() if flat.numel() else b""
    values = flat.double()
    eps = max(eps, float(torch.finfo(flat.dtype).eps) if flat.is_floating_point() else 0.0)
    magnitudes = values.abs()
    largest = float(magnitudes.max()) if values.numel() else 0.0
    is_faint = (magnitudes <= max_rounding(eps) * largest) & (magnitudes > 0.0)
    return Fingerprint(
        eps=eps,
        faint_share=float(is_faint.double().mean()) if values.numel() else 0.0,
        numel=values.numel(),
        norm=float(torch.linalg.vector_norm(values)),
        largest=largest,
        projections=tuple(_project(values).tolist()),
        digest=digest_bits(memoryview(raw)),
    )


def _project(values: Tensor) -> Tensor:
    """Return the projections, computed by torch: numpy's threads would compete with those of the training loop."""
    position_signs, block_signs = (torch.from_numpy(signs) for signs in projection_signs(values.numel()))
    padded = values.new_zeros(len(block_signs) * len(position_signs))
    padded[: values.numel()] = values
    return (padded.view(len(block_signs), len(position_signs)) @ position_signs * block_signs).sum(dim=0)


def strip_wrapper_names(name: str) -> str:
    """Return the FQN without the parts that wrappers add."""
    parts = [part for part in name.split(".") if part not in _WRAPPER_NAMES]
    while len(parts) > 1 and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts)


def _encode_fingerprints(fingerprints: Mapping[str, Fingerprint]) -> dict[str, list[Any]]:
    return {name: value.as_json() for name, value in fingerprints.items()}
