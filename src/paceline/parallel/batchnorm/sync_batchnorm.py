"""Synchronize BatchNorm over one microbatch of every replica, on any device.

torch's `SyncBatchNorm` refuses CPU tensors. The layers here first sum counts and values over the ranks, and then the
squared deviations from the joint mean. The formula "mean of squares minus squared mean" would need only one all-reduce,
but it loses all digits if the two terms are nearly equal. Every rank takes part in every call, also a rank without
samples.
"""

import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from paceline.comm.process_group import World
from paceline.errors import LayoutError
from paceline.torch_internals.private_api import BatchNormBase


class _JointMoments(torch.autograd.Function):
    """An all-reduce sum whose gradient is all-reduced too."""

    @staticmethod
    @override
    def forward(ctx: Any, moments: Tensor, world: World) -> Tensor:
        ctx.world = world
        return world.all_reduce(moments.clone())

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        world: World = ctx.world
        return world.all_reduce(grads[0].contiguous().clone()), None


@dataclass
class SyncBatchNormSampleWeight:
    """The weight of this rank's samples in all synchronized layers.

    It is 1, or 0 while a rank without samples runs a stand-in batch.
    """

    weight: float = 1.0


class _SynchronizedForward:
    """The forward of one BatchNorm layer, with moments over all ranks."""

    def __init__(self, module: BatchNormBase, world: World, sample_weight: SyncBatchNormSampleWeight) -> None:
        self._sample_weights = sample_weight
        self._module = module
        self._world = world
        self._local_forward = module.forward

    def __call__(self, x: Tensor) -> Tensor:
        module = self._module
        if not module.training or self._world.world_size == 1:
            return self._local_forward(x)
        dtype, x = x.dtype, x.to(torch.promote_types(x.dtype, torch.float32))  # half precision is too coarse for counts
        dims = [d for d in range(x.dim()) if d != 1]
        shape = [1, -1] + [1] * (x.dim() - 2)
        local_count = x.new_full((1,), x.numel() / x.shape[1])
        weight = self._sample_weights.weight
        joint: Tensor = _JointMoments.apply(torch.cat([local_count, x.sum(dims)]) * weight, self._world)  # type: ignore[no-untyped-call]
        count, mean = joint[0], joint[1:] / joint[0]
        squared_deviations = (x - mean.view(shape)).square().sum(dims) * weight
        squares: Tensor = _JointMoments.apply(squared_deviations, self._world)  # type: ignore[no-untyped-call]
        variance = squares / count
        self._update_statistics(mean.detach(), (variance * (count / (count - 1).clamp(min=1))).detach())
        y = (x - mean.view(shape)) * torch.rsqrt(variance.view(shape) + module.eps)
        if module.affine:
            y = y * module.weight.view(shape) + module.bias.view(shape)
        return y.to(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_SynchronizedForward":
        """Copy the layer but share the process group, so that the norms of a copied model are synchronized too."""
        copied = copy.copy(self)
        copied._module = copy.deepcopy(self._module, memo)
        copied._local_forward = partial(type(copied._module).forward, copied._module)
        return copied

    def _update_statistics(self, mean: Tensor, variance: Tensor) -> None:
        module = self._module
        if module.running_mean is None or module.running_var is None or not module.track_running_stats:
            return
        with torch.no_grad():
            if module.num_batches_tracked is not None:
                module.num_batches_tracked.add_(1)
            momentum = module.momentum
            if momentum is None:
                momentum = 0.0 if module.num_batches_tracked is None else 1.0 / float(module.num_batches_tracked)
            module.running_mean.lerp_(mean, momentum)
            module.running_var.lerp_(variance, momentum)


def synchronize_batchnorms(model: nn.Module, *, world: World) -> SyncBatchNormSampleWeight:
    """Synchronize every BatchNorm of the model over all replicas, without changes of names and parameters.

    Return the weight of this rank's samples, which the caller sets.

    Raises:
        LayoutError: the model has no BatchNorm.
    """
    norms = [module for module in model.modules() if isinstance(module, BatchNormBase)]
    if not norms:
        raise LayoutError("train.buffers=sync_bn, but the model has no BatchNorm.", hint="--train.buffers fold")
    sample_weight = SyncBatchNormSampleWeight()
    for module in norms:
        module.forward = _SynchronizedForward(module, world, sample_weight)  # type: ignore[method-assign, assignment]
    return sample_weight
