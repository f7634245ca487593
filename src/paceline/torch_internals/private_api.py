"""Code that uses private torch APIs, which are not documented. `dispatch_modes.py` uses some more of them.

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
- `Module._compiled_call_impl`: `Module.__call__` calls it first, `Module.compile` sets it, and a copy of a module does
  not have it;
- wrapper subclasses, which are tensors without memory; the hooks of all optimizers; a processor's capabilities.
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
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data._utils import worker as _data_worker
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import _BaseDataLoaderIter
from typing_extensions import override

__all__ = [
    "BatchNormBase",
    "BufferAccessObserver",
    "CallInterceptor",
    "DropoutBase",
    "JointScaler",
    "NormBase",
    "add_all",
    "allocate_meta_tensors",
    "compute_gradients",
    "copy_all",
    "disabled_torch_function",
    "divide_all",
    "enable_compile_errors",
    "has_amx_tiles",
    "has_global_optimizer_hooks",
    "has_hooks",
    "hide_process_group",
    "hide_worker_info",
    "hook_dicts",
    "is_in_backward",
    "is_view",
    "lerp_all",
    "make_subclass",
    "make_wrapper_tensor",
    "mark_iterator_shut_down",
    "module_registries",
    "pin_memory",
    "recompile_on_hook_changes",
    "remove_all_hooks",
    "running_autograd_function",
    "set_up_data_worker",
    "set_worker_dataset",
    "stop_data_workers",
    "storage_key",
    "tensor_version",
    "tree_flatten",
    "tree_unflatten",
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
def has_amx_tiles() -> bool:
    """Return whether this machine's processor has bfloat16 matrix tiles (AMX)."""
    return bool(torch.cpu._is_amx_tile_supported())


def has_global_optimizer_hooks() -> bool:
    """Return whether a hook is called in the step of every optimizer."""
    return bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)


def recompile_on_hook_changes() -> None:
    """Make torch recompile a module when its hooks change.

    Otherwise two models of one class in one process, as in `verify`, would run each other's hooks or none.
    """
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def enable_compile_errors() -> type[BaseException]:
    """Configure torch so that compilation errors occur in the forward; return the type of these errors."""
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    torch._functorch.config.force_non_lazy_backward_lowering = True
    error_class: type[BaseException] = torch._dynamo.exc.TorchDynamoException
    return error_class


def is_in_backward() -> bool:
    """Return whether this thread is inside an autograd backward, for example in a recomputed forward."""
    return bool(torch._C._current_graph_task_id() != -1)


def run_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    """Run backward as `torch.autograd.backward` does, but keep the active function modes.

    `torch.autograd.backward` disables the innermost mode, so a forward that checkpointing recomputes would miss it.
    """
    grads = _output_gradients(outputs, gradients)
    _run_backward(tuple(outputs), grads, False, False, (), allow_unreachable=True, accumulate_grad=True)


def compute_gradients(
    outputs: Sequence[Any], inputs: Sequence[Tensor], gradients: Sequence[Tensor | None], *, retain_graph: bool = False
) -> tuple[Tensor | None, ...]:
    """Return the result of `torch.autograd.grad(..., allow_unused=True)`, computed with function modes kept active."""
    grads = _output_gradients(outputs, gradients)
    input_gradients: tuple[Tensor | None, ...] = _run_backward(
        tuple(outputs), grads, retain_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
    )
    return input_gradients


def _output_gradients(outputs: Sequence[Any], gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Return the gradients of the outputs, with ones for outputs whose gradient is None."""
    pairs = zip(outputs, gradients, strict=True)
    return tuple(torch.ones_like(output) if gradient is None else gradient for output, gradient in pairs)


def running_autograd_function() -> type[torch.autograd.Function] | None:
    """Return the innermost autograd function whose forward this thread is running, or None."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not torch.autograd.Function.apply.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    function: type[torch.autograd.Function] | None = None if frame is None else frame.f_locals["cls"]
    return function


@contextmanager
def observe_autograd(on_use: Callable[[str], None]) -> Iterator[None]:
    """Call `on_use` with the name of each custom autograd function, tensor hook and autocast region of user code.

    Calls by torch and by this package are ignored.
    """
    function: Any = torch.autograd.Function
    original_apply = vars(function)["apply"]  # the classmethod itself, not bound to this class
    original_enter: Callable[[torch.autocast], Any] = torch.autocast.__enter__
    hooks = {name: getattr(Tensor, name) for name in ("register_hook", "register_post_accumulate_grad_hook")}

    def observed_apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not _is_internal(cls.__module__):
            on_use(f"{cls.__qualname__}.apply")
        return original_apply.__func__(cls, *args, **kwargs)

    def observe_hook(name: str) -> Callable[..., Any]:
        def observed_hook(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not _is_internal(sys._getframe(1).f_globals.get("__name__", "")):
                on_use(f"Tensor.{name}")
            return hooks[name](tensor, *args, **kwargs)

        return observed_hook

    def observed_enter(region: torch.autocast) -> Any:
        if not _is_internal(sys._getframe(1).f_globals.get("__name__", "")):
            on_use("torch.autocast")
        return original_enter(region)

    function.apply = classmethod(observed_apply)
    torch.autocast.__enter__ = observed_enter  # type: ignore[method-assign]
    for name in hooks:
        setattr(Tensor, name, observe_hook(name))
    try:
        yield
    finally:
        function.apply = original_apply
        torch.autocast.__enter__ = original_enter  # type: ignore[method-assign]
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


class BufferAccessObserver:
    """An observer of accesses to the buffers of `module`.

    Two kinds of access are observed: reads of an attribute whose name is in `names`, and loops over all buffers of the
    module, as in `module.buffers()`. Each access calls `on_access(code, instruction)`. `code` is the code object that
    makes the access, and `instruction` is the offset of the instruction in its bytecode. The observer replaces the
    module's dict of buffers; copies and pickles of the module have a plain dict.
    """

    def __init__(
        self, module: nn.Module, *, names: Collection[str], on_access: Callable[[CodeType, int], None]
    ) -> None:
        self._module = module
        buffers = _ObservedBuffers(vars(module)["_buffers"])
        buffers.names, buffers.on_access = frozenset(names), on_access
        vars(module)["_buffers"] = buffers

    def close(self) -> None:
        """Restore the module's plain dict."""
        vars(self._module)["_buffers"] = dict(vars(self._module)["_buffers"])


_TORCH_FOLDER = torch.__file__.rpartition("__init__")[0]


class _ObservedBuffers(dict[str, Tensor | None]):
    names: frozenset[str] = frozenset()
    on_access: Callable[[CodeType, int], None]

    @override
    def __getitem__(self, name: str) -> Tensor | None:
        if name in self.names and not torch.compiler.is_compiling():
            frame = sys._getframe(1)
            if frame.f_code is nn.Module.__getattr__.__code__ and frame.f_back is not None:
                self.on_access(frame.f_back.f_code, frame.f_back.f_lasti)
        return super().__getitem__(name)

    @override
    def items(self) -> Any:
        if not torch.compiler.is_compiling():
            frame = sys._getframe(1)
            while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH_FOLDER):
                frame = frame.f_back
            self.on_access(frame.f_code, frame.f_lasti)
        return super().items()

    @override
    def __reduce_ex__(self, _: object) -> tuple[type, tuple[dict[str, Tensor | None]]]:
        return dict, (dict(self),)


def make_wrapper_tensor(tensor_class: type[Tensor], *, like: Tensor, shape: Sequence[int]) -> Any:
    """Return a tensor of a subclass with a shape, dtype and device but without memory."""
    return Tensor._make_wrapper_subclass(
        tensor_class, torch.Size(shape), dtype=like.dtype, device=like.device, requires_grad=False
    )


def tensor_version(tensor: Tensor) -> int:
    """Return the tensor's version, which every in-place write increments; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else int(tensor._version)


def make_subclass(data: Tensor, *, like: Tensor) -> Tensor:
    """Return `data` as a tensor or parameter with the class and `requires_grad` of `like`; the memory is shared."""
    tensor: Tensor = Tensor._make_subclass(type(like), data, like.requires_grad)
    return tensor


def allocate_meta_tensors(model: nn.Module, *, device: torch.device, excluded_ids: Collection[int] = ()) -> None:
    """Allocate uninitialised memory for the model's meta tensors, except those in `excluded_ids`."""

    def allocate(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device=device) if tensor.is_meta and id(tensor) not in excluded_ids else tensor

    model._apply(allocate)


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


def mark_iterator_shut_down(error: BaseException) -> None:
    """Mark a DataLoader iterator as shut down if its constructor raised this error and left it half initialised."""
    for frame, _ in walk_tb(error.__traceback__):
        iterator = frame.f_locals.get("self")
        if isinstance(iterator, _BaseDataLoaderIter):
            vars(iterator)["_shutdown"] = True


def set_up_data_worker(dataset: Any, *, seed: int) -> None:
    """Set up this process like the only data worker of a DataLoader: worker info, threads and generators."""
    _data_worker._worker_info = _data_worker.WorkerInfo(id=0, num_workers=1, seed=seed, dataset=dataset)
    torch.set_num_threads(1)
    random.seed(seed)
    np.random.seed(seed & 0xFFFF_FFFF)
    torch.manual_seed(seed)


def set_worker_dataset(dataset: Any, *, is_only_worker: bool) -> None:
    """Make `get_worker_info()` in a data worker report the user's dataset; with `is_only_worker`, a single worker."""
    info = _data_worker._worker_info
    assert info is not None
    for name, value in {"dataset": dataset, **({"id": 0, "num_workers": 1} if is_only_worker else {})}.items():
        object.__setattr__(info, name, value)


def hide_worker_info() -> None:
    """Make `get_worker_info()` in a data worker return None from now on.

    Otherwise a dataset that splits itself over the workers would split a shard that already belongs to one worker.
    """
    _data_worker._worker_info = None


@contextmanager
def hide_process_group() -> Iterator[None]:
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
    """A loss scaler for sharded gradients. `all_reduce_max` (in place) makes an overflow on one rank known to all."""

    def __init__(self, device: str, *, all_reduce_max: Callable[[Tensor], object], **options: Any) -> None:
        super().__init__(device, **options)
        self._all_reduce_max = all_reduce_max

    @override
    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        found_by_device = super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)
        flags = [flag.to(inv_scale.device) for flag in found_by_device.values()]
        max_found_inf = torch.stack(flags or [found_inf]).amax(0)
        self._all_reduce_max(max_found_inf)
        return {device: max_found_inf.to(device) for device in found_by_device or [inv_scale.device]}


class CallInterceptor:
    """A wrapper that passes the calls of a module to `intercept(call, *args, **kwargs)`, outside of all its hooks.

    `call` runs the original call: hooks and forward, compiled if the module is. This includes hooks that are registered
    later, such as those of `fully_shard`. After `Module.compile`, call `rewrap`, so that the compiled code runs inside.
    """

    def __init__(self, module: torch.nn.Module, intercept: Callable[..., Any]) -> None:
        self._module, self._intercept, self._original_call = module, intercept, module._compiled_call_impl
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Handle a call of the module; `Module.__call__` calls this method first."""
        return self._intercept(self._run_original, *args, **kwargs)

    def rewrap(self) -> None:
        """Wrap the module's call again if `Module.compile` has replaced this wrapper."""
        if self._module._compiled_call_impl is not self:
            self._original_call = self._module._compiled_call_impl
            self._module._compiled_call_impl = self

    def undo(self) -> None:
        """Remove the wrapper."""
        self._module._compiled_call_impl = self._original_call

    def _run_original(self, *args: Any, **kwargs: Any) -> Any:
        call: Callable[..., Any] = self._module._call_impl if self._original_call is None else self._original_call
        return call(*args, **kwargs)


def hook_dicts(module: nn.Module) -> list[dict[int, Callable[..., Any]]]:
    """Return the dicts of a module's own hooks and of its own parameters' hooks, by hook id."""
    tables = [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks]
    for parameter in module._parameters.values():
        if parameter is not None:
            tables += filter(None, (parameter._backward_hooks, parameter._post_accumulate_grad_hooks))
    return tables


def remove_all_hooks(module: torch.nn.Module) -> None:
    """Remove all forward and backward hooks and call wrappers of a module and its submodules."""
    for part in module.modules():
        part._compiled_call_impl = None
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks, part._backward_pre_hooks):
            hooks.clear()
