"""Recording of the kernel calls that update a norm's running statistics, also for norms with a custom forward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from paceline.parallel.module_access.tensor_access import equal_tensors
from paceline.torch_internals.private_api import BatchNormBase, NormBase, storage_key

Call = tuple[Tensor, float]
"""Mean and variance, flattened, after a write, and the weight of the batch in it."""

_BY_TORCH = {torch.batch_norm: (3, 5, 6), torch.instance_norm: (3, 5, 6)}
_BY_NAME = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}


def is_norm_kernel(func: Any) -> bool:
    """Return whether a torch function is a normalization that takes running statistics."""
    return func in _BY_NAME or func in _BY_TORCH


def is_standard(module: NormBase) -> bool:
    """Return whether the norm has torch's forward."""
    return type(module).forward.__module__.startswith("torch.nn.") and "forward" not in vars(module)


def statistics_of(module: NormBase) -> Tensor:
    """Return a copy of running mean and variance, flattened and concatenated."""
    assert module.running_mean is not None and module.running_var is not None
    return torch.cat([module.running_mean.detach().reshape(-1), module.running_var.detach().reshape(-1)])


def standard_calls(module: NormBase) -> tuple[list[Call], int, bool]:
    """Return what the last call of a torch norm wrote, its count increment, and whether it used running statistics.

    A negative weight marks a cumulative average: -1/n for the n-th call.
    """
    counts, tracks = isinstance(module, BatchNormBase), module.track_running_stats
    takes_batch = module.training or not (counts or tracks)
    if not takes_batch or (counts and not tracks):
        return [], 0, not takes_batch
    weight = 0.0 if module.momentum is None else float(module.momentum)
    if not counts or module.num_batches_tracked is None:
        return [(statistics_of(module), weight)], 0, False
    if module.momentum is None:
        weight = -1.0 / float(module.num_batches_tracked)
    return [(statistics_of(module), weight)], 1, False


class KernelWatch(TorchFunctionMode):
    """A function mode that records the kernel calls of one norm call that use the norm's running statistics.

    A write without such a kernel, by a formula in Python, counts as one call with the norm's momentum. With `inputs`,
    the formula is checked, and `is_unknown` is set if it is not a running average.
    """

    def __init__(self, module: NormBase, inputs: tuple[object, ...] = ()) -> None:
        super().__init__()
        self._module, self._start, self._inputs = module, statistics_of(module), inputs
        self.is_unknown = False
        self._count = self._tracked()
        self.calls: list[Call] = []
        self.bumps, self.reads = 0, False
        self._is_on = not torch.compiler.is_compiling()
        if self._is_on:
            self.__enter__()  # type: ignore[no-untyped-call]

    def ended(self) -> "KernelWatch":
        """Stop watching after the call; return self with `calls`, `bumps` and `reads` filled in."""
        if self._is_on:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._module.running_mean is not None:
            self.bumps = self._tracked() - self._count
            now = statistics_of(self._module)
            if not equal_tensors(now, self.calls[-1][0] if self.calls else self._start):
                weight = self._weight(self._module.momentum)
                self.is_unknown = bool(self._inputs) and not (
                    weight >= 0.0 and not self.calls and _is_average(self._start, now, weight, self._inputs[0])
                )
                self.calls.append((now, weight))
        return self

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; record it if it is a normalization with the norm's running statistics."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        mean, trains, weight = _given(func, args, kwargs)
        own = self._module.running_mean
        if mean is not None and own is not None and storage_key(mean) == storage_key(own):
            self.reads = self.reads or not trains
            if trains:
                self.calls.append((statistics_of(self._module), self._weight(weight)))
        return found

    def _weight(self, weight: float | None) -> float:
        """Return the weight of a write; negative for a cumulative average."""
        if self._module.momentum is None and self._module.num_batches_tracked is not None:
            return -1.0 / max(1.0, float(self._module.num_batches_tracked))
        return float(weight or 0.0)

    def _tracked(self) -> int:
        count = self._module.num_batches_tracked
        return 0 if count is None else int(count)


def _is_average(before: Tensor, after: Tensor, weight: float, x: object) -> bool:
    """Return whether `after` keeps `1 - weight` of `before` and adds the mean and variance of the batch `x`."""
    if not isinstance(x, Tensor) or x.dim() < 2 or 2 * x.shape[1] != before.numel():
        return False
    x = x.detach().to(before.dtype).transpose(0, 1).flatten(1)
    added, kept = after - (1.0 - weight) * before, 1e-3 * (1.0 + before.abs().max())
    mean, variances = x.mean(1), [x.var(1, correction=unbiased) for unbiased in (0, 1)]
    return any(bool(((added - weight * torch.cat([mean, each])).abs() <= kept).all()) for each in variances)


def _given(func: Any, args: Any, kwargs: Any) -> tuple[Tensor | None, bool, float]:
    """Return the running mean that `func` uses (None if it uses none), whether `func` writes it, and the weight."""
    if func in _BY_NAME:
        flag = _BY_NAME[func]
        names = ("input", "running_mean", "running_var", "weight", "bias", flag, "momentum", "eps")
        known = dict(zip(names, args, strict=False)) | kwargs
        default = func is F.instance_norm
        return known.get("running_mean"), bool(known.get(flag, default)), float(known.get("momentum", 0.1))
    if func in _BY_TORCH:
        mean, trains, weight = (args[place] if len(args) > place else None for place in _BY_TORCH[func])
        return mean, bool(trains), float(weight or 0.0)
    return None, False, 0.0
