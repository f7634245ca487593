"""Detection of values inside the model that code outside of it reads; a last stage may not have these values."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from paceline.errors import LayoutError, current_user_line
from paceline.parallel.module_access.user_call_isolation import side_effect_free
from paceline.parallel.pipeline.stage_io import tensors_in
from paceline.torch_internals.dispatch_modes import OpObserver
from paceline.torch_internals.private_api import CallInterceptor


@dataclass(frozen=True, kw_only=True)
class ExternalRead:
    """A read, outside the model, of a value that was made inside the model.

    `operation` made the value, in the module `module_name` ("" outside of all listed modules). `where` is the line that
    reads the value.
    """

    operation: str
    module_name: str
    where: str


def find_external_reads(
    model: nn.Module, *, module_names: Sequence[str], call: Callable[[], Any]
) -> tuple[ExternalRead, ...]:
    """Run `call`, the model's forward and loss on one example, without side effects, and return the external reads.

    `module_names` lists the modules that an external read can name. None of them is split over several stages.

    Raises:
        LayoutError: the model is called twice.
    """
    recorder = _ReadRecorder()
    interceptors = [CallInterceptor(model.get_submodule(name), recorder.module_handler(name)) for name in module_names]
    interceptors.append(CallInterceptor(model, recorder.handle_model_call))
    try:
        with side_effect_free(model), torch.no_grad(), OpObserver(recorder.record_operation):
            call()
    finally:
        for interceptor in reversed(interceptors):
            interceptor.undo()
    return tuple(recorder.reads)


def refuse_external_reads(reads: Sequence[ExternalRead], *, last_stage_modules: Collection[str]) -> None:
    """Raise for reads of values that are not made on the last stage, where the loss runs.

    Raises:
        LayoutError: such a read exists; the message names the value and the line.
    """
    for read in reads:
        if read.module_name not in last_stage_modules:
            raise LayoutError(
                f"the loss reads a value ({read.operation}) made in {read.module_name or 'the forward'}, but the model "
                "does not return it.",
                where=read.where,
                cause="an auxiliary loss or features, stored on a module, in a list or by a hook: the loss runs on the "
                "last stage, which does not have values that other stages store",
                hint="return the value from its module and as part of the model's output; or --layout ddp or fsdp",
            )


def called_twice_error() -> LayoutError:
    """Return the error for a `forward=` or a loss that calls the model twice."""
    line = current_user_line()
    return LayoutError(
        "the forward calls the model twice, but a stage ends after the model's first call.",
        where="" if line is None else str(line),
        cause="two views of a batch, a teacher or a consistency term (R-Drop, SimCSE), each with its own call",
        hint="pass both as one batch: model(torch.cat([a, b])), and split its output; or --layout ddp or fsdp",
    )


class _ReadRecorder:
    """The origin of each tensor made inside the model, and the reads of these tensors outside of it."""

    def __init__(self) -> None:
        self.reads: list[ExternalRead] = []
        self._origins = WeakIdKeyDictionary()  # storage -> (operation, module name)
        self._is_inside_model = False
        self._is_model_called = False
        self._current_module_name = ""

    def handle_model_call(self, original_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Handle the call of the model; forget the origins of its output, which all code may read."""
        if self._is_model_called:
            raise called_twice_error()
        self._is_model_called = self._is_inside_model = True
        output = original_call(*args, **kwargs)
        self._is_inside_model = False
        for _, tensor in tensors_in(output):
            self._origins.pop(_storage(tensor), None)
        return output

    def module_handler(self, name: str) -> Callable[..., Any]:
        """Return the handler for calls of a listed module; during a call, this is the current module."""

        def handle_call(original_call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            outer_name, self._current_module_name = self._current_module_name, name
            try:
                return original_call(*args, **kwargs)
            finally:
                self._current_module_name = outer_name

        return handle_call

    def record_operation(self, operation: Any, args: Any, kwargs: Any, result: Any, is_random: bool) -> None:
        """Record the values that an operation makes inside the model or reads outside of it."""
        inputs = [tensor for _, tensor in tensors_in([args, kwargs])]
        if self._is_inside_model:
            input_storages = {id(_storage(tensor)) for tensor in inputs}
            for _, tensor in tensors_in(result):
                if id(storage := _storage(tensor)) not in input_storages:
                    self._origins[storage] = operation.overloadpacket.__name__, self._current_module_name
            return
        for tensor in inputs:
            operation_name, module_name = self._origins.pop(_storage(tensor), ("", ""))
            if operation_name:
                self.reads.append(
                    ExternalRead(
                        operation=operation_name, module_name=module_name, where=str(current_user_line() or "")
                    )
                )


def _storage(tensor: Tensor) -> Any:
    """Return the storage, which views share; for a sparse tensor, which has no storage, the tensor itself."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else tensor
