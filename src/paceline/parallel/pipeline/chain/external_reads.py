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
    """A read, outside the model, of a value made in it: the operation and unit that made it, and the reading line."""

    name: str
    unit: str
    where: str


def find_external_reads(model: nn.Module, *, units: Sequence[str], call: Callable[[], Any]) -> tuple[ExternalRead, ...]:
    """Run `call`, the model's forward and loss on one example, without side effects, and return the external reads.

    Raises:
        LayoutError: the model is called twice.
    """
    watcher = _Watcher()
    gates = [CallInterceptor(model.get_submodule(name), watcher.unit(name)) for name in units]
    gates.append(CallInterceptor(model, watcher.model))
    try:
        with side_effect_free(model), torch.no_grad(), OpObserver(watcher.see):
            call()
    finally:
        for gate in reversed(gates):
            gate.undo()
    return tuple(watcher.taken)


def refuse_external_reads(reads: Sequence[ExternalRead], *, last_stage_units: Collection[str]) -> None:
    """Raise for reads of values that are not made on the last stage, where the loss runs.

    Raises:
        LayoutError: such a read exists; the message names the value and the line.
    """
    for read in reads:
        if read.unit not in last_stage_units:
            raise LayoutError(
                f"the loss reads a value ({read.name}) made in {read.unit or 'the forward'}, but the model does not "
                "return it.",
                where=read.where,
                cause="an auxiliary loss or features, left on a module, in a list or by a hook: the last stage, which "
                "has the loss, does not have other stages'",
                hint="return it from its module, and add it in the model's output; or --layout ddp or fsdp",
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


class _Watcher:
    def __init__(self) -> None:
        self.taken: list[ExternalRead] = []
        self._made = WeakIdKeyDictionary()
        self._inside = False
        self._called = False
        self._unit = ""

    def model(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Handle the call of the model; discard the values in its output, which every reader may use."""
        if self._called:
            raise called_twice_error()
        self._called = self._inside = True
        output = call(*args, **kwargs)
        self._inside = False
        for _, tensor in tensors_in(output):
            self._made.pop(_memory(tensor), None)
        return output

    def unit(self, name: str) -> Callable[..., Any]:
        """Return the handler for calls of a unit, which sets the current unit."""

        def answer(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            before, self._unit = self._unit, name
            try:
                return call(*args, **kwargs)
            finally:
                self._unit = before

        return answer

    def see(self, operation: Any, args: Any, kwargs: Any, result: Any, drew: bool) -> None:
        """Record the values that an operation makes inside the model or reads outside of it."""
        given = [tensor for _, tensor in tensors_in([args, kwargs])]
        if self._inside:
            old = {id(_memory(tensor)) for tensor in given}
            name = operation.overloadpacket.__name__
            for _, tensor in tensors_in(result):
                if id(memory := _memory(tensor)) not in old:
                    self._made[memory] = name, self._unit
            return
        for tensor in given:
            name, unit = self._made.pop(_memory(tensor), ("", ""))
            if name:
                self.taken.append(ExternalRead(name=name, unit=unit, where=str(current_user_line() or "")))


def _memory(tensor: Tensor) -> Any:
    """Return the storage, which views share; for a sparse tensor, which has no storage, the tensor itself."""
    return tensor.untyped_storage() if tensor.layout is torch.strided else tensor
