"""The only module that uses torch APIs that are not documented as public.

Tested on torch 2.11 to 2.13:

- `torch._foreach_*`, which torch's optimizers use, and `Tensor._version`, which every in-place write increments;
- the base classes of BatchNorm, of all norms with running statistics, and of dropout;
- the worker info of a data worker, the pinning of a batch, and the shutdown of a DataLoader's iterator;
- the replacement of the default process group;
- the identifier of the current backward pass; the autograd engine's `_engine_run_backward`; the hooks of tensors and
  modules, and their identifiers;
- the guards of compiled modules, and the exception of a failed compilation;
- the unscaling of gradients by a loss scaler;
- the key of a storage, a tensor's class, and a module's own dicts of parameters and buffers;
- `Module._compiled_call_impl`, which `Module.__call__` calls first, `Module.compile` sets and copies omit;
- wrapper subclasses, which are tensors without memory;
- the capabilities of a processor.
"""

import random
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from traceback import walk_tb
from types import CodeType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward as _run_backward
from torch.distributed import distributed_c10d
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.dropout import _DropoutNd as DropoutBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data._utils import worker as _data_worker
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle

__all__ = [
    "BatchNormBase",
    "BufferAccess",
    "CallInterceptor",
    "DropoutBase",
    "JointScaler",
    "NormBase",
    "abandon_data_workers",
    "add_all",
    "allocate_meta_tensors",
    "become_worker",
    "compile_errors",
    "copy_all",
    "disabled_torch_function",
    "divide_all",
    "gradients_of",
    "guard_hooks",
    "has_hooks",
    "has_tiles",
    "hide_worker",
    "hook_tables",
    "in_backward",
    "introduce_worker",
    "is_view",
    "lerp_all",
    "make_wrapper_tensor",
    "module_registries",
    "next_hook_number",
    "of_type",
    "pin_memory",
    "remove_all_hooks",
    "run_backward",
    "running_function",
    "stop_data_workers",
    "storage_key",
    "tensor_version",
    "tree_flatten",
    "tree_unflatten",
    "without_group",
]


disabled_torch_function = torch._C._disabled_torch_function_impl  # for a subclass that uses only __torch_dispatch__


def divide_all(tensors: Sequence[Tensor], divisor: float | Tensor) -> None:
    """Divide each tensor in place, with few kernel launches."""
    if tensors:
        torch._foreach_div_(list(tensors), divisor)


def add_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Add each source to its target in place, with few kernel launches."""
    if targets:
        torch._foreach_add_(list(targets), list(sources))


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source to its target, with few kernel launches."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def lerp_all(targets: Sequence[Tensor], sources: Sequence[Tensor], weight: float) -> None:
    """Interpolate each target towards its source by `weight`, in place, with few kernel launches."""
    if targets:
        torch._foreach_lerp_(list(targets), list(sources), weight)


@cache
def has_tiles() -> bool:
    """Return whether this machine's processor has bfloat16 matrix tiles (AMX)."""
    return bool(torch.cpu._is_amx_tile_supported())


def guard_hooks() -> None:
    """Make torch recompile a module when its hooks change.

    Otherwise two models of one class in one process, as in `verify`, would run each other's hooks or none.
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def compile_errors() -> type[BaseException]:
    """Configure torch so that compilation errors occur in the forward; return the type of these errors."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    torch._functorch.config.force_non_lazy_backward_lowering = True
    found: type[BaseException] = torch._dynamo.exc.TorchDynamoException
    return found


def in_backward() -> bool:
    """Return whether this thread is inside an autograd backward, for example in a recomputed forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run backward as `torch.autograd.backward` does, but keep the active function modes.

    `torch.autograd.backward` disables the innermost mode, so a forward that checkpointing recomputes would miss it.
    """
    given = _given(outputs, gradients)
    _run_backward(tuple(outputs), given, False, False, (), allow_unreachable=True, accumulate_grad=True)


def gradients_of(
    outputs: Sequence[Any], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *, retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Return the result of `torch.autograd.grad(..., allow_unused=True)`, computed with function modes kept active."""
    given = _given(outputs, gradients)
    found: tuple[Tensor | None, ...] = _run_backward(
        tuple(outputs), given, retain_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return found


def _given(outputs: Sequence[Any], gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the gradients of the outputs, with ones for outputs whose gradient is None."""
    pairs = zip(outputs, gradients, strict=True)
    return tuple(torch.ones_like(output) if gradient is None else gradient for output, gradient in pairs)


def running_function() -> type[torch.autograd.Function] | None:
    """Return the innermost autograd function whose forward this thread is running, or None."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.autograd.Function.apply.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    found: type[torch.autograd.Function] | None = None if frame is None else frame.f_locals["cls"]
    return found


@contextmanager
def watched_autograd(seen: Callable[[str], None]) -> Iterator[None]:
    """Call `seen` with the name of each custom autograd function, tensor hook and autocast region of user code.

    Calls by torch and by this package are ignored.
    """
    function: Any = torch.autograd.Function
    apply = vars(function)["apply"]  # the classmethod itself, not bound to this class
    enter: Callable[[torch.autocast], Any] = torch.autocast.__enter__
    hooks = {name: getattr(Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")}

    def applied(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not _is_internal(cls.__module__):
            seen(f"{cls.__qualname__}.apply")
        return apply.__func__(cls, *args, **kwargs)

    def hooking(name: str) -> Callable[..., Any]:
        def hooked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _is_internal(sys._getframe(1).f_globals.get("__name__", "")):
                seen(f"Tensor.{name}")
            return hooks[name](tensor, *args, **kwargs)

        return hooked

    def entered(region: torch.autocast) -> Any:
        if not _is_internal(sys._getframe(1).f_globals.get("__name__", "")):
            seen("torch.autocast")
        return enter(region)

    function.apply = classmethod(applied)
    torch.autocast.__enter__ = entered  # type: ignore[method-assign]
    for name in hooks:
        setattr(Tensor, name, hooking(name))
    try:
        yield
    finally:
        function.apply = apply
        torch.autocast.__enter__ = enter  # type: ignore[method-assign]
        for name, hook in hooks.items():
            setattr(Tensor, name, hook)


def _is_internal(module: str) -> bool:
    return module.partition(".")[0] in ("torch", "paceline")


def has_hooks(tensor: Tensor) -> bool:
    """Return whether the tensor has gradient hooks that run before or after accumulation."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def is_inside_functorch() -> bool:
    """Return whether this code runs inside `torch.func` transforms: vmap, grad, jvp or their compositions."""
    return bool(torch._C._are_functorch_transforms_active())


def is_view(tensor: Tensor) -> bool:
    """Return whether autograd treats the tensor as a view."""
    return bool(tensor._is_view())


class BufferAccess:
    """An observer of accesses to the buffers `names` of `module`.

    Each access calls `seen(code, instruction)` with the accessing code: attribute access, and loops over the dict
    of buffers as in `module.buffers()`. The observer replaces the module's dict of buffers; copies and pickles of the
    module have a plain dict.
    """

    def __init__(self, module: nn.Module, *, names: Collection[str], seen: Callable[[CodeType, int], None]) -> None:
        self._module = module
        buffers = _WatchedBuffers(vars(module)["_buffers"])
        buffers.names, buffers.seen = frozenset(names), seen
        vars(module)["_buffers"] = buffers

    def close(self) -> None:
        """Restore the module's plain dict."""
        vars(self._module)["_buffers"] = dict(vars(self._module)["_buffers"])


_TORCH_FOLDER = torch.__file__.rpartition("__init__")[0]


class _WatchedBuffers(dict[str, Tensor | None]):
    names: frozenset[str] = frozenset()
    seen: Callable[[CodeType, int], None]

    def __getitem__(self, name: str) -> Tensor | None:
        if name in self.names and not torch.compiler.is_compiling():
            frame = sys._getframe(1)
            if frame.f_code is nn.Module.__getattr__.__code__ and frame.f_back is not None:
                self.seen(frame.f_back.f_code, frame.f_back.f_lasti)
        return super().__getitem__(name)

    def items(self) -> Any:
        if not torch.compiler.is_compiling():
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH_FOLDER):
                frame = frame.f_back
            self.seen(frame.f_code, frame.f_lasti)
        return super().items()

    def __reduce_ex__(self, _: object) -> tuple[type, tuple[dict[str, Tensor | None]]]:
        return dict, (dict(self),)


def make_wrapper_tensor(kind: type[Tensor], *, like: Tensor, shape: Sequence[int]) -> Any:
    """Return a tensor of a subclass with a shape, dtype and device but without memory."""
    return Tensor._make_wrapper_subclass(
        kind, torch.Size(shape), dtype=like.dtype, device=like.device, requires_grad=False
    )


def tensor_version(tensor: Tensor) -> int:
    """Return the tensor's version, which every in-place write increments; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else int(tensor._version)


def of_type(data: Tensor, *, like: Tensor) -> Tensor:
    """Return `data` as a tensor or parameter with the class and `requires_grad` of `like`; the memory is shared."""
    made: Tensor = Tensor._make_subclass(type(like), data, like.requires_grad)
    return made


def allocate_meta_tensors(model: nn.Module, *, device: torch.device, without: Collection[int] = ()) -> None:
    """Allocate uninitialised memory for the model's meta tensors, except those whose ids are in `without`."""

    def memory(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta and id(tensor) not in without else tensor

    model._apply(memory)


def module_registries(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dicts of a module's own parameters and buffers; writes to them bypass the checks of `setattr`."""
    return module._parameters, module._buffers


def storage_key(tensor: Tensor) -> int:
    """Return a number that is equal for tensors that share memory, including meta tensors, while one of them exists."""
    return int(tensor.untyped_storage()._cdata)


def stop_data_workers(iterator: Any) -> None:
    """Stop a DataLoader's workers and wait for them; torch has no public function for this.

    torch requests the shutdown, waits five seconds and sends SIGTERM. This function kills workers that ignore SIGTERM.
    """
    iterator._shutdown_workers()
    for process in getattr(iterator, "_workers", ()):
        if process.is_alive():
            process.kill()
        process.join()


def abandon_data_workers(error: BaseException) -> None:
    """Mark a DataLoader iterator as shut down if its constructor raised this error and left it half initialised."""
    for frame, _ in walk_tb(error.__traceback__):
        made = frame.f_locals.get("self")
        if isinstance(made, _BaseDataLoaderIter):
            vars(made)["_shutdown"] = True


def become_worker(dataset: Any, *, seed: int) -> None:
    """Set up this process like the only data worker of a DataLoader: worker info, threads and generators."""
    _data_worker._worker_info = _data_worker.WorkerInfo(id=0, num_workers=1, seed=seed, dataset=dataset)
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.manual_seed(seed)


def introduce_worker(dataset: Any, *, alone: bool) -> None:
    """Make `get_worker_info()` in a data worker return the user's own dataset, and no other worker if requested."""
    info = _data_worker._worker_info
    assert info is not None
    for name, value in {"dataset": dataset, **({"id": 0, "num_workers": 1} if alone else {})}.items():
        object.__setattr__(info, name, value)


def hide_worker() -> None:
    """Make `get_worker_info()` in a data worker return None from now on.

    Otherwise a dataset that splits itself over the workers would split a shard that already belongs to one worker.
    """
    _data_worker._worker_info = None


@contextmanager
def without_group() -> Iterator[None]:
    """Make `torch.distributed` appear uninitialised, as in a process without a process group."""
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
    """A loss scaler for gradients that are sharded over several ranks: all ranks detect an overflow on one of them.

    `join` all-reduces a tensor in place over these ranks with MAX.
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


class CallInterceptor:
    """A wrapper that passes the calls of a module to `gate(call, *args, **kwargs)`, outside of all its hooks.

    `call` runs the original call: hooks and forward, compiled if the module is. This includes hooks that are registered
    later, such as those of `fully_shard`. After `Module.compile`, call `renew`, so that the compiled code runs inside.
    """

    def __init__(self, module: torch.nn.Module, gate: Callable[..., Any]) -> None:
        self._module, self._gate, self._inner = module, gate, module._compiled_call_impl
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Handle a call of the module; `Module.__call__` calls this method first."""
        return self._gate(self._call, *args, **kwargs)

    def renew(self) -> None:
        """Wrap the module's call again if `Module.compile` has replaced this wrapper."""
        if self._module._compiled_call_impl is not self:
            self._inner = self._module._compiled_call_impl
            self._module._compiled_call_impl = self

    def undo(self) -> None:
        """Remove the wrapper."""
        self._module._compiled_call_impl = self._inner

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        inner: Callable[..., Any] = self._module._call_impl if self._inner is None else self._inner
        return inner(*args, **kwargs)


def next_hook_number() -> int:
    """Return the number of the next hook that this process registers; numbers increase."""
    return RemovableHandle.next_id


def hook_tables(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return the dicts of a module's own hooks and of its own parameters' hooks, by hook number."""
    tables = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    for parameter in module._parameters.values():
        if parameter is not None:
            tables += filter(None, (parameter._backward_hooks, parameter._post_accumulate_grad_hooks))
    return tables


def remove_all_hooks(module: torch.nn.Module) -> None:
    """Remove all forward and backward hooks of a module and its submodules."""
    for part in module.modules():
        part._compiled_call_impl = None
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
