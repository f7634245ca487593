"""Results of operations on tensors without values: plausible integers, and shapes that torch's inference gets wrong."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.errors import JobError, current_user_line


def _one_if_float(func: Any, args: Any, kwargs: Any) -> Any:
    """Return 1.0 for a floating-point number, whose value is unknown. Integers and booleans have values."""
    return 1.0 if args[0].is_floating_point() else func(*args, **kwargs)


def _always_true(func: Any, args: Any, kwargs: Any) -> bool:
    return True


# operations that return a Python number or boolean
FIXED_RESULTS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "aten::_local_scalar_dense": _one_if_float,
    "aten::equal": _always_true,
    "aten::is_nonzero": _always_true,
    "aten::allclose": _always_true,
}
COMPARISONS = {"aten::gt", "aten::ge", "aten::lt", "aten::le"}
_POSITION_OPERATIONS = {  # their int64 results are positions
    "aten::topk",
    "aten::sort",
    "aten::argsort",
    "aten::argmax",
    "aten::argmin",
    "aten::max",
    "aten::min",
}
_POSITION_OPERATIONS |= {"aten::multinomial"}
RANDOM_MASKS = {"aten::native_dropout", "aten::bernoulli"}
"""Operations that create masks as large as activations. In fake execution nothing reads the values of these masks."""


def fill_unknown_integers(func: Any, tensor: Tensor, args: Any, *, comparisons_are_true: bool) -> None:
    """Fill integers or booleans that an operation computed from unknown numbers.

    Every number counts as finite. Each position is chosen equally often, so that experts get equally many tokens.
    `comparisons_are_true` is the result of `>`, `>=`, `<` and `<=`: True in a step, and False while a model is built.
    With True, a constructor that samples again while a value is too large would never end.
    """
    name = func._schema.name
    if name in _POSITION_OPERATIONS and tensor.dtype is torch.int64:
        _fill_with_positions_in_order(tensor, args)
    elif name in ("aten::eq", "aten::ne"):  # so that tests for NaN (x != x) and infinity fail
        tensor.fill_(_is_infinite(args[1]) == (name == "aten::ne"))
    elif comparisons_are_true and name in COMPARISONS:
        tensor.fill_(1)
    else:
        tensor.zero_()


def _is_infinite(value: Any) -> bool:
    return isinstance(value, float) and math.isinf(value)


def _fill_with_positions_in_order(tensor: Tensor, args: Any) -> None:
    """Fill with 0, 1, 2, ... up to the size of the dimension that the operation reduces or sorts, repeatedly."""
    source: Tensor = args[0]
    integers = [arg for arg in args[1:] if isinstance(arg, int) and not isinstance(arg, bool)]
    dim = integers[-1] if integers and -source.dim() <= integers[-1] < source.dim() else -1
    size = source.shape[dim] if source.dim() else 1
    tensor.copy_((torch.arange(tensor.numel()) % max(size, 1)).view(tensor.shape))


def result_shapes(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the operation's results for meta arguments, with a correction if torch's shape inference is wrong."""
    corrected = _CORRECTIONS.get(func._schema.name)
    return func(*args, **kwargs) if corrected is None else corrected(func, args, kwargs)


def unknown_result_error(func: Any, error: Exception) -> JobError:
    """Return the error for an operation whose result shapes can't be determined without values."""
    name, sizes = func._schema.name, {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & {*func.tags}
    return JobError(
        f"the result of {name} is unknown without real values.",
        where=str(current_user_line() or ""),
        cause="the size of the result depends on values"
        if sizes
        else f"the operation has no shape rule: {_first_line(error)}",
        hint="use an operation whose result size depends on operand sizes only: torch.where with three arguments"
        if sizes
        else "name a layout, so that no plan is needed: --layout ddp"
        if name.startswith("aten::")
        else f'@torch.library.register_fake("{name}") on a function that returns empty results of the right sizes',
    )


PACKED_SEQUENCE_OPERATIONS = {"aten::_pack_padded_sequence": 2, "aten::_pad_packed_sequence": 1}
"""Operations that pack or pad sequences of several lengths, with the number of leading dimensions that index a row."""


def packed_sequence_form(func: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], Tensor]:
    """Return the form (shape, strides, dtype) of the packed or padded data, and the lengths.

    They are computed from known values: the operation runs on rows of one element.
    """
    data, num_row_dims = args[0], PACKED_SEQUENCE_OPERATIONS[func._schema.name]
    narrow_data, lengths = func(torch.zeros((*data.shape[:num_row_dims], 1), dtype=data.dtype), *args[1:], **kwargs)
    shape = (*narrow_data.shape[: 3 - num_row_dims], *data.shape[num_row_dims:])
    return (shape, torch.empty(shape, device="meta").stride(), data.dtype), lengths


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _nonzero_everywhere(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Return the result of `nonzero` if no element is zero."""
    positions: Tensor = args[0].new_empty((args[0].dim(), args[0].numel()), dtype=torch.int64)
    return positions.t()


def _unique_everywhere(func: Any, args: Any, kwargs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `unique` if all elements differ."""
    tensor, options = args[0], dict(zip(("sorted", "return_inverse", "return_counts"), args[1:], strict=False)) | kwargs
    inverse = tensor.shape if options.get("return_inverse") or options.get("return_counts") else (0,)
    counts = (tensor.numel(),) if options.get("return_counts") else (0,)
    indices = [tensor.new_empty(shape, dtype=torch.int64) for shape in (inverse, counts)]
    return tensor.new_empty((tensor.numel(),)), *indices


def _grouped_matmul(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Return the result of a grouped matmul. Torch's shape inference accepts few dtypes and alignments only."""
    left, right = args[0], args[1]
    offsets = args[2] if len(args) > 2 else kwargs.get("offs")
    shapes = {
        (2, 3): (left.shape[0], right.shape[-1]),
        (3, 2): (left.shape[1] if left.dim() == 3 else 0, right.shape[-1]),
        (3, 3): (left.shape[0], left.shape[-2], right.shape[-1]),
        (2, 2): (0 if offsets is None else offsets.shape[0], left.shape[0], right.shape[-1]),
    }
    result: Tensor = left.new_empty(shapes[left.dim(), right.dim()], dtype=kwargs.get("out_dtype") or left.dtype)
    return result


_FEW_POSITIONS, _MORE_POSITIONS = 8, 24  # in sequences; the workspace is extrapolated from both
_PAGE_BYTES = 4096


def _recurrent_layer(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a recurrent layer with its workspace, which torch's shape inference omits.

    The workspace of a long sequence is extrapolated from two short ones.
    """
    source, other_arguments = args[0], args[1:]
    output, hidden, cell, reserve = func(*args, **kwargs)
    positions = source.shape[0]

    def workspace_bytes(length: int) -> int:
        zero_arguments = [
            _zeros_like(source[:length]),
            *(_zeros_like(arg) if isinstance(arg, Tensor) else arg for arg in other_arguments),
        ]
        workspace = func(*zero_arguments, **kwargs)[3]
        return 0 if workspace is None else int(workspace.numel())  # None without gradients

    if positions <= _MORE_POSITIONS:
        num_bytes = workspace_bytes(positions)
    else:
        few, more = workspace_bytes(_FEW_POSITIONS), workspace_bytes(_MORE_POSITIONS)
        num_bytes = more + (more - few) * (positions - _MORE_POSITIONS) // (_MORE_POSITIONS - _FEW_POSITIONS)
        num_bytes = -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES
    return output, hidden, cell, torch.empty(num_bytes, dtype=torch.uint8, device="meta") if num_bytes else reserve


def _zeros_like(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


_CORRECTIONS = {
    "aten::_grouped_mm": _grouped_matmul,
    "aten::mkldnn_rnn_layer": _recurrent_layer,
    "aten::nonzero": _nonzero_everywhere,
    "aten::_unique2": _unique_everywhere,
}
