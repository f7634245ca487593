"""Record the kernel calls that update a norm's running statistics, also for norms with a custom forward."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from paceline.parallel.module_access.tensor_access import equal_tensors
from paceline.torch_internals.private_api import BatchNormBase, NormBase, storage_key

Call = tuple[Tensor, float]
"""The mean and variance after a write, flattened, and the weight of the batch in them."""

# the positions of three arguments: running mean, training mode (the statistics are written), and momentum
_TORCH_ARGUMENT_POSITIONS = {torch.batch_norm: (3, 5, 6), torch.instance_norm: (3, 5, 6)}
_MODE_ARGUMENT = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}


def is_norm_function(func: Any) -> bool:
    """Return whether a torch function is a normalization that takes running statistics."""
    return func in _MODE_ARGUMENT or func in _TORCH_ARGUMENT_POSITIONS


def has_torch_forward(module: NormBase) -> bool:
    """Return whether the norm has torch's forward."""
    return type(module).forward.__module__.startswith("torch.nn.") and "forward" not in vars(module)


def copy_statistics(module: NormBase) -> Tensor:
    """Return a copy of running mean and variance, flattened and concatenated."""
    assert module.running_mean is not None and module.running_var is not None
    return torch.cat([module.running_mean.detach().reshape(-1), module.running_var.detach().reshape(-1)])


def torch_norm_calls(module: NormBase) -> tuple[list[Call], int, bool]:
    """Describe the last call of a norm with torch's forward.

    Return a list with the call, or an empty list if it wrote no statistics; how much it increased the batch count; and
    whether it used running statistics. A negative weight marks a cumulative average: -1/n for the n-th call.
    """
    has_count, tracks_statistics = isinstance(module, BatchNormBase), module.track_running_stats
    uses_batch_statistics = module.training or not (has_count or tracks_statistics)
    if not uses_batch_statistics or (has_count and not tracks_statistics):
        return [], 0, not uses_batch_statistics
    momentum = 0.0 if module.momentum is None else float(module.momentum)
    if not has_count or module.num_batches_tracked is None:
        return [(copy_statistics(module), momentum)], 0, False
    if module.momentum is None:
        momentum = -1.0 / float(module.num_batches_tracked)
    return [(copy_statistics(module), momentum)], 1, False


class KernelWatch(TorchFunctionMode):
    """A function mode that records the kernel calls of one norm call that use the norm's running statistics.

    A formula in Python may write to the statistics without such a kernel. This write counts as one call with the norm's
    momentum. If the norm's `inputs` are given, the formula is checked, and `is_unknown` is set if it is not a running
    average.
    """

    def __init__(self, module: NormBase, inputs: tuple[object, ...] = ()) -> None:
        super().__init__()
        self._module, self._initial_statistics, self._inputs = module, copy_statistics(module), inputs
        self.is_unknown = False
        self._initial_count = self._num_batches()
        self.calls: list[Call] = []
        self.num_count_increments, self.has_used_statistics = 0, False
        self._is_on = not torch.compiler.is_compiling()
        if self._is_on:
            self.__enter__()  # type: ignore[no-untyped-call]

    def stop(self) -> "KernelWatch":
        """Stop watching after the call; return self with all results filled in."""
        if self._is_on:
            self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if self._module.running_mean is not None:
            self.num_count_increments = self._num_batches() - self._initial_count
            current = copy_statistics(self._module)
            if not equal_tensors(current, self.calls[-1][0] if self.calls else self._initial_statistics):
                weight = self._weight(self._module.momentum)
                self.is_unknown = bool(self._inputs) and not (
                    weight >= 0.0
                    and not self.calls
                    and _is_running_average(self._initial_statistics, current, weight, self._inputs[0])
                )
                self.calls.append((current, weight))
        return self

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`; record it if it is a normalization with the norm's running statistics."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        mean, is_written, weight = _running_mean_argument(func, args, kwargs)
        running_mean = self._module.running_mean
        if mean is not None and running_mean is not None and storage_key(mean) == storage_key(running_mean):
            self.has_used_statistics = self.has_used_statistics or not is_written
            if is_written:
                self.calls.append((copy_statistics(self._module), self._weight(weight)))
        return result

    def _weight(self, weight: float | None) -> float:
        """Return the weight of the batch in a write, negative for a cumulative average; `weight` is the momentum."""
        if self._module.momentum is None and self._module.num_batches_tracked is not None:
            return -1.0 / max(1.0, float(self._module.num_batches_tracked))
        return float(weight or 0.0)

    def _num_batches(self) -> int:
        count = self._module.num_batches_tracked
        return 0 if count is None else int(count)


def _is_running_average(before: Tensor, after: Tensor, weight: float, x: object) -> bool:
    """Return whether `after` keeps `1 - weight` of `before` and adds the mean and variance of the batch `x`."""
    if not isinstance(x, Tensor) or x.dim() < 2 or 2 * x.shape[1] != before.numel():
        return False
    x = x.detach().to(before.dtype).transpose(0, 1).flatten(1)
    batch_term, tolerance = after - (1.0 - weight) * before, 1e-3 * (1.0 + before.abs().max())
    mean, variances = x.mean(1), [x.var(1, correction=unbiased) for unbiased in (0, 1)]
    return any(
        bool(((batch_term - weight * torch.cat([mean, variance])).abs() <= tolerance).all()) for variance in variances
    )


def _running_mean_argument(func: Any, args: Any, kwargs: Any) -> tuple[Tensor | None, bool, float]:
    """Return the running mean that `func` uses (None if it uses none), whether `func` writes it, and the weight."""
    if func in _MODE_ARGUMENT:
        flag = _MODE_ARGUMENT[func]
        names = ("input", "running_mean", "running_var", "weight", "bias", flag, "momentum", "eps")
        arguments = dict(zip(names, args, strict=False)) | kwargs
        default = func is F.instance_norm  # `use_input_stats` is True by default, `training` is False
        return arguments.get("running_mean"), bool(arguments.get(flag, default)), float(arguments.get("momentum", 0.1))
    if func in _TORCH_ARGUMENT_POSITIONS:
        positions = _TORCH_ARGUMENT_POSITIONS[func]
        mean, is_written, weight = (args[position] if len(args) > position else None for position in positions)
        return mean, bool(is_written), float(weight or 0.0)
    return None, False, 0.0
