"""Placeholders for modules that a stage does not hold: they return NaN, which reveals any use of their values.

A copy of the module on the device "meta" gives the output shapes, once for each combination of input shapes.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import LayoutError
from paceline.parallel.pipeline.stage_io import (
    OutputClasses,
    Path,
    Spec,
    flatten_output,
    replace_at,
    tensors_in,
    unflatten_output,
)
from paceline.torch_internals.private_api import remove_all_hooks

Kind = tuple[torch.Size, torch.dtype]
Form = tuple[Spec, tuple[Path | None, ...]]
Pool = dict[tuple[Kind, torch.device], Tensor]


class Placeholder:
    """The placeholder of one module.

    `form` is used if the copy can't run on "meta", as with experts that read values of their tokens. It describes the
    traced output, and names for each output tensor an input of the same shape.
    """

    def __init__(self, module: nn.Module, *, name: str, kinds: OutputClasses, form: Form | None = None) -> None:
        self._name = name
        self._kinds = kinds
        self._skeleton = _without_memory(module)
        self._module = module
        self._known: dict[Any, tuple[Spec, list[Kind]]] = {}
        self._form = form

    def answer(self, args: Any, kwargs: Any, *, pool: Pool | None = None) -> Any:
        """Return the module's output with NaN for floats and 0 for integers; a `pool` shares tensors of equal shape."""
        value = {"args": args, "kwargs": kwargs}
        inputs = dict(tensors_in(value))
        kinds = tuple((path, tensor.shape, tensor.dtype) for path, tensor in inputs.items())
        key = self._module.training, kinds
        if key not in self._known:
            self._known[key] = self._shapes(value, inputs)
        spec, shapes = self._known[key]
        device = next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
        return unflatten_output(spec, iter([_filled(kind, device, pool) for kind in shapes]), self._kinds)

    def _shapes(self, value: Any, inputs: Mapping[Path, Tensor]) -> tuple[Spec, list[Kind]]:
        try:
            if self._skeleton is None:
                raise RuntimeError("it can't be copied")
            moved = replace_at(value, {path: _on_meta(tensor) for path, tensor in inputs.items()})
            tensors, spec = flatten_output(self._run(self._skeleton, moved), where=self._name)
            return spec, [(tensor.shape, tensor.dtype) for tensor in tensors]
        except LayoutError:
            raise
        except Exception as error:  # a module that needs real values can raise any exception
            if self._form is None or any(path not in inputs for path in self._form[1]):
                raise LayoutError(
                    f"the shape of what {self._name} returns can't be determined without its weights: {error}",
                    hint="cut so that only the first stage calls it, or make it a block",
                ) from error
            spec, like = self._form
            return spec, [(inputs[path].shape, inputs[path].dtype) for path in like if path is not None]

    def _run(self, skeleton: nn.Module, moved: Any) -> Any:
        """Run the copy in the module's mode; if that fails, run it in eval mode, in which BatchNorm accepts one row."""
        for copied, module in zip(skeleton.modules(), self._module.modules(), strict=True):
            copied.training = module.training
        with torch.no_grad():
            try:
                return skeleton(*moved["args"], **moved["kwargs"])
            except Exception:
                if not any(module.training for module in skeleton.modules()):
                    raise
                return skeleton.eval()(*moved["args"], **moved["kwargs"])


def form_of(output: Any, *, where: str, given: Mapping[Path, Kind]) -> Form | None:
    """Return the description of a block's output, with an input of equal shape and dtype for each tensor.

    Return None if the output can't be sent to another stage.
    """
    try:
        tensors, spec = flatten_output(output, where=where)
    except LayoutError:
        return None
    kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
    return spec, tuple(next((path for path, kind in given.items() if kind == each), None) for each in kinds)


def _without_memory(module: nn.Module) -> nn.Module | None:
    """Return a copy with parameters and buffers on "meta", without copying their memory; None if that fails."""
    tensors = [*module.parameters(), *module.buffers()]
    memo: dict[int, Any] = {id(tensor): _meta_of(tensor) for tensor in tensors}
    try:
        skeleton = copy.deepcopy(module, memo)
    except Exception:  # a module that holds a lock, a generator, a file
        return None
    remove_all_hooks(skeleton)
    return skeleton


def _meta_of(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _filled(kind: Kind, device: torch.device, pool: Pool | None) -> Tensor:
    if pool is not None and (kind, device) in pool:
        return pool[kind, device]
    shape, dtype = kind
    made = torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
    if pool is not None:
        pool[kind, device] = made
    return made
