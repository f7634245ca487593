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
    OutputSpec,
    TensorPath,
    flatten_output,
    substitute_tensors,
    tensors_in,
    unflatten_output,
)
from paceline.torch_internals.private_api import remove_all_hooks

TensorType = tuple[torch.Size, torch.dtype]
OutputTemplate = tuple[OutputSpec, tuple[TensorPath | None, ...]]
"""The description of an output, and for each of its tensors the path of an input of the same shape and dtype."""
TensorPool = dict[tuple[TensorType, torch.device], Tensor]
"""Filled tensors that the placeholders of one forward share."""


class Placeholder:
    """The placeholder of one module.

    `template` gives the structure of the output if the copy can't run on "meta", for example because it contains
    experts that read the values of their tokens.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        output_classes: OutputClasses,
        template: OutputTemplate | None = None,
    ) -> None:
        self._name = name
        self._output_classes = output_classes
        self._meta_copy = _copy_to_meta(module)
        self._module = module
        self._output_cache: dict[Any, tuple[OutputSpec, list[TensorType]]] = {}
        self._template = template

    def make_output(self, args: Any, kwargs: Any, *, pool: TensorPool | None = None) -> Any:
        """Return the module's output, filled with NaN (integers: 0); with a `pool`, equal tensors are shared."""
        arguments = {"args": args, "kwargs": kwargs}
        inputs = dict(tensors_in(arguments))
        input_types = tuple((path, tensor.shape, tensor.dtype) for path, tensor in inputs.items())
        key = self._module.training, input_types
        if key not in self._output_cache:
            self._output_cache[key] = self._infer_output(arguments, inputs)
        spec, tensor_types = self._output_cache[key]
        device = next((tensor.device for tensor in inputs.values()), torch.device("cpu"))
        tensors = iter([_filled_tensor(tensor_type, device, pool) for tensor_type in tensor_types])
        return unflatten_output(spec, tensors, self._output_classes)

    def _infer_output(self, arguments: Any, inputs: Mapping[TensorPath, Tensor]) -> tuple[OutputSpec, list[TensorType]]:
        """Return the output's description and the types of its tensors, from the copy or else from the template."""
        try:
            if self._meta_copy is None:
                raise RuntimeError("it can't be copied")
            meta_inputs = {path: _meta_tensor(tensor) for path, tensor in inputs.items()}
            output = self._run_meta_copy(self._meta_copy, substitute_tensors(arguments, meta_inputs))
            tensors, spec = flatten_output(output, where=self._name)
            return spec, [(tensor.shape, tensor.dtype) for tensor in tensors]
        except LayoutError:
            raise
        except Exception as error:  # a module that needs real values can raise any exception
            if self._template is None or any(path not in inputs for path in self._template[1]):
                raise LayoutError(
                    f"the shape of the output of {self._name} can't be determined without its weights: {error}",
                    hint="cut so that only the first stage calls the module, or make the module a block",
                ) from error
            spec, input_paths = self._template
            return spec, [(inputs[path].shape, inputs[path].dtype) for path in input_paths if path is not None]

    def _run_meta_copy(self, meta_copy: nn.Module, arguments: Any) -> Any:
        """Run the copy in the module's mode; if that fails, run it in eval mode, in which BatchNorm accepts one row."""
        for copied, module in zip(meta_copy.modules(), self._module.modules(), strict=True):
            copied.training = module.training
        with torch.no_grad():
            try:
                return meta_copy(*arguments["args"], **arguments["kwargs"])
            except Exception:
                if not any(module.training for module in meta_copy.modules()):
                    raise
                return meta_copy.eval()(*arguments["args"], **arguments["kwargs"])


def output_template(output: Any, *, where: str, input_types: Mapping[TensorPath, TensorType]) -> OutputTemplate | None:
    """Return the description of a block's output, with an input of equal shape and dtype for each tensor.

    Return None if the output can't be sent to another stage.
    """
    try:
        tensors, spec = flatten_output(output, where=where)
    except LayoutError:
        return None
    types = [(tensor.shape, tensor.dtype) for tensor in tensors]
    return spec, tuple(next((path for path, known in input_types.items() if known == each), None) for each in types)


def _copy_to_meta(module: nn.Module) -> nn.Module | None:
    """Return a copy with parameters and buffers on "meta", without copying their memory; None if that fails."""
    memo: dict[int, Any] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        empty = _meta_tensor(tensor)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty
    try:
        meta_copy = copy.deepcopy(module, memo)
    except Exception:  # a module that holds a lock, a generator, a file
        return None
    remove_all_hooks(meta_copy)
    return meta_copy


def _meta_tensor(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _filled_tensor(tensor_type: TensorType, device: torch.device, pool: TensorPool | None) -> Tensor:
    if pool is not None and (tensor_type, device) in pool:
        return pool[tensor_type, device]
    shape, dtype = tensor_type
    filled = torch.full(shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=device)
    if pool is not None:
        pool[tensor_type, device] = filled
    return filled
