"""The one place that touches what torch does not document as public.

Tried on torch 2.11 to 2.13: `torch._foreach_*` (used by every optimizer of torch itself), dispatch modes and
`Tensor._version` (bumped by every write in place), and the common bases of
BatchNorm, of all norms with running statistics, and of dropout; the data worker's note about itself; the default
process group, set aside for a while; the number of the backward that a thread is in; what compiled modules are
guarded by; how a loss scaler unscales gradients.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data._utils import worker as _data_worker

__all__ = [
    "BatchNormBase",
    "DropoutBase",
    "JointScaler",
    "NormBase",
    "SeededOps",
    "add_all",
    "copy_all",
    "divide_all",
    "guard_hooks",
    "hide_worker",
    "in_backward",
    "introduce_worker",
    "is_view",
    "lerp_all",
    "stop_data_workers",
    "version",
    "without_group",
]


def divide_all(tensors: Sequence[Tensor], divisor: float | Tensor) -> None:
    """Divide each tensor in place, in few kernels."""
    if tensors:
        torch._foreach_div_(list(tensors), divisor)


def add_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add each source to its target in place, in few kernels."""
    if targets:
        torch._foreach_add_(list(targets), list(sources))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source over its target, in few kernels."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def lerp_all(targets: Sequence[Tensor], sources: Sequence[Tensor], weight: float) -> None:
    """Move each target towards its source by `weight`, in few kernels."""
    if targets:
        torch._foreach_lerp_(list(targets), list(sources), weight)


def guard_hooks() -> None:
    """Let a compiled module be compiled anew where its hooks are others.

    Otherwise two models of one class in one process, as `verify` has them, run each other's hooks or none.
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def in_backward() -> bool:
    """Whether this thread is inside autograd's backward, as a forward that is run again there is."""
    return bool(torch._C._current_graph_task_id() != -1)


def is_view(tensor: Tensor) -> bool:
    """Whether the tensor is a view that autograd knows as one."""
    return bool(tensor._is_view())


def version(tensor: Tensor) -> int:
    """A number that changes whenever the tensor is written in place."""
    return int(tensor._version)


def stop_data_workers(iterator: Any) -> None:
    """Stop a DataLoader's workers and wait for them; torch gives no public way.

    Its own way asks, waits five seconds, sends SIGTERM and leaves it there. What ignores SIGTERM is killed here.
    """
    iterator._shutdown_workers()
    for process in getattr(iterator, "_workers", ()):
        if process.is_alive():
            process.kill()
        process.join()


def introduce_worker(dataset: Any, *, alone: bool) -> None:
    """In a data worker: `get_worker_info()` names the user's own dataset, and no other worker if `alone`."""
    info = _data_worker._worker_info
    assert info is not None
    for name, value in {"dataset": dataset, **({"id": 0, "num_workers": 1} if alone else {})}.items():
        object.__setattr__(info, name, value)


def hide_worker() -> None:
    """In a data worker: `get_worker_info()` says None from here on.

    A dataset that splits itself over the workers that it sees would split a shard that is one worker's whole.
    """
    _data_worker._worker_info = None


class SeededOps(TorchDispatchMode):
    """Sees whether an operation that draws random numbers runs in this thread while the mode is on."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Pass everything on."""
        self.seen = self.seen or torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


@contextmanager
def without_group() -> Iterator[None]:
    """Let `torch.distributed` look as it does in a process that never joined a group."""
    if not (dist.is_available() and dist.is_initialized()):
        yield
        return
    group = distributed_c10d._get_default_group()
    distributed_c10d._update_default_pg(None)
    try:
        yield
    finally:
        distributed_c10d._update_default_pg(group)


class JointScaler(torch.amp.GradScaler):
    """A loss scaler for gradients that lie in pieces on several ranks: all find an overflow that one finds.

    `join` reduces a tensor in place over those ranks with MAX.
    """

    def __init__(self, device: str, *, join: Callable[[Tensor], object], **options: Any) -> None:
        super().__init__(device, **options)
        self._join = join

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        joint = torch.stack([one.to(inv_scale.device) for one in found.values()] or [found_inf]).amax(0)
        self._join(joint)
        return {device: joint.to(device) for device in found or [inv_scale.device]}
