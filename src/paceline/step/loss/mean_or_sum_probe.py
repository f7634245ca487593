"""A probe that detects a loss that is not a sum over samples. It runs once, only on a loss without side effects.

For example, `(F.cross_entropy(output, target), len(target))` is divided by the count twice. The probe runs the loss on
both halves of a microbatch. If the loss is a sum, the results of the halves add up to the result of the whole
microbatch. If it is a mean, they add up only after all three results are multiplied by their counts. If the loss
returns only a scalar, the scalar must be the mean over samples, not a mean over unmasked labels, a weighted mean or the
root of a mean.
"""

import builtins
import dis
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.torch_internals.scalars import as_number

_PURE_BUILTINS = (
    abs,
    bool,
    dict,
    enumerate,
    float,
    int,
    isinstance,
    len,
    list,
    max,
    min,
    range,
    set,
    sorted,
    str,
    sum,
    tuple,
    zip,
)
# functions, methods and attributes of torch without side effects; a loss that uses any other is not probed
_PURE_TORCH_NAMES = frozenset(
    [
        "abs", "add", "all", "amax", "amin", "any", "arange", "argmax", "argmin", "bfloat16",
        "binary_cross_entropy", "binary_cross_entropy_with_logits", "bmm", "bool", "cat", "cdist", "chunk", "clamp",
        "clip", "contiguous", "cos", "cosine_embedding_loss", "cosine_similarity", "cross_entropy", "cumsum",
        "detach", "device", "diag", "diagonal", "dim", "div", "dot", "double", "dtype", "einsum", "eq", "exp",
        "expand", "expand_as", "eye", "flatten", "float", "float32", "float64", "full_like", "functional", "gather",
        "gaussian_nll_loss", "ge", "gelu", "gt", "huber_loss", "ignore_index", "index_select", "int", "item",
        "kl_div", "l1_loss", "le", "linalg", "log", "log1p", "log_softmax", "logical_and", "logical_not",
        "logical_or", "logits", "logsigmoid", "logsumexp", "long", "lt", "margin_ranking_loss", "masked_fill",
        "masked_select", "matmul", "max", "maximum", "mean", "min", "minimum", "mm", "mse_loss", "mT", "mul",
        "nan_to_num", "ndim", "ne", "neg", "new_ones", "new_zeros", "nll_loss", "nn", "norm", "normalize", "numel",
        "one_hot", "ones", "ones_like", "outer", "permute", "poisson_nll_loss", "pow", "prod", "reciprocal", "relu",
        "repeat", "repeat_interleave", "reshape", "roll", "rsqrt", "shape", "sigmoid", "sign", "silu", "sin",
        "size", "smooth_l1_loss", "soft_margin_loss", "softmax", "softplus", "split", "sqrt", "square", "squeeze",
        "stack", "std", "sub", "sum", "t", "T", "take_along_dim", "tanh", "tensor", "to", "topk", "transpose",
        "tril", "triplet_margin_loss", "triu", "type_as", "unbind", "unsqueeze", "var", "vector_norm", "view",
        "where", "zeros", "zeros_like"
    ]
)  # fmt: skip
_CONSTANT_TYPES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_TORCH_LOSSES = "torch.nn.modules.loss"
_NAME_OPCODES = frozenset({"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "LOAD_SUPER_ATTR"})
_WRITE_OPCODES = frozenset(
    {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "YIELD_VALUE", "IMPORT_NAME"}
)
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 2e-2  # relative rounding of a sum over a microbatch, and in half precision
MEAN_WITH_COUNT, NOT_ADDITIVE = "a mean with a count", "not additive"


@dataclass(frozen=True, kw_only=True)
class LossFault:
    """The fault of a loss that is not a sum over samples.

    `kind` is `MEAN_WITH_COUNT` or `NOT_ADDITIVE`. `full` is the loss of a microbatch, and `halves` are the losses of
    its two halves. `is_scalar`: the loss returns only a scalar, without a count.
    """

    kind: str
    full: float
    halves: tuple[float, float]
    is_scalar: bool = False


def find_loss_fault(loss: Any, output: Any, batch: Any, result: tuple[Tensor, Any]) -> LossFault | None:
    """Return the fault of a loss that is not a sum over samples, or None if no fault is found.

    `result` is the `(sum, count)` of the loss for `output` and `batch`. The loss runs on each half of the microbatch,
    without gradients. If the loss could have side effects, or the microbatch cannot be halved, the loss does not run.
    """
    if not has_no_side_effects(loss):
        return None
    size = output.shape[0] if type(output) is Tensor and output.dim() else 0
    slices = slice(0, size // 2), slice(size // 2, size)
    half_arguments = [(_slice_samples(output, size, half), _slice_samples(batch, size, half)) for half in slices]
    if size < 2 or any(argument is None for arguments in half_arguments for argument in arguments):
        return None
    try:
        with torch.no_grad(), torch.random.fork_rng(_cuda_devices(output)):
            halves = [loss(*arguments) for arguments in half_arguments]
    except Exception:  # the user's code need not accept half a microbatch
        return None
    is_scalar = all(isinstance(half, Tensor) for half in halves)
    if is_scalar:  # a scalar is treated as the mean over the samples
        sizes = [half.stop - half.start for half in slices]
        halves = [(mean * num_samples, num_samples) for mean, num_samples in zip(halves, sizes, strict=True)]
    pairs = [_as_numbers(result), *map(_as_numbers, halves)]
    numbers = [pair for pair in pairs if pair is not None and pair[1] > 0]
    if len(numbers) < len(pairs) or numbers[1][1] + numbers[2][1] != numbers[0][1]:
        return None
    tolerance = _TOLERANCE if output.dtype in (torch.float32, torch.float64) else _HALF_TOLERANCE
    return _classify_fault(numbers, is_scalar=is_scalar, tolerance=tolerance)


def _classify_fault(numbers: Sequence[tuple[float, float]], *, is_scalar: bool, tolerance: float) -> LossFault | None:
    """Return the fault that the `(sum, count)` of a microbatch and of its two halves show, or None."""
    (total, count), (first, first_count), (second, second_count) = numbers
    if not math.isfinite(total) or _is_close(first + second, total, tolerance * (abs(first) + abs(second))):
        return None
    if is_scalar:
        return LossFault(
            kind=NOT_ADDITIVE, full=total / count, halves=(first / first_count, second / second_count), is_scalar=True
        )
    products = first * first_count, second * second_count
    is_mean = _is_close(sum(products), total * count, tolerance * sum(map(abs, products)))
    return LossFault(kind=MEAN_WITH_COUNT if is_mean else NOT_ADDITIVE, full=total, halves=(first, second))


def has_no_side_effects(function: Any, *, seen: frozenset[int] = frozenset()) -> bool:
    """Return True if calls of a function certainly have no side effect, on this rank or on other ranks.

    The function must write nothing, and use only constants, other functions without side effects, and torch operations
    that only compute: no collective, random draw or in-place update.
    """
    if isinstance(function, partial):
        values = [*function.args, *function.keywords.values()]
        return has_no_side_effects(function.func, seen=seen) and all(
            _is_constant_or_pure(value, seen) for value in values
        )
    if _is_pure_torch(function):
        return True
    if not isinstance(function, FunctionType):
        return False
    if id(function) in seen:
        return True
    has_out_argument = any("out" in const for const in function.__code__.co_consts if isinstance(const, tuple))
    if has_out_argument or any(_is_unsafe(function, instruction) for instruction in dis.get_instructions(function)):
        return False
    seen |= {id(function)}
    captured = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    captured += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all(_is_constant_or_pure(value, seen) for value in captured) and all(
        _is_pure_global(name, function, seen) for name in _global_names(function)
    )


def _global_names(function: FunctionType) -> list[str]:
    instructions = dis.get_instructions(function)
    return [
        str(instruction.argval) for instruction in instructions if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    ]


def _is_pure_global(name: str, function: FunctionType, seen: frozenset[int]) -> bool:
    if name in function.__globals__:
        return _is_constant_or_pure(function.__globals__[name], seen)
    return getattr(builtins, name, None) in _PURE_BUILTINS


def _is_constant_or_pure(value: Any, seen: frozenset[int]) -> bool:
    if isinstance(value, tuple):
        return all(_is_constant_or_pure(item, seen) for item in value)
    if isinstance(value, ModuleType):
        return _is_torch_or_math(value.__name__)
    return isinstance(value, _CONSTANT_TYPES) or has_no_side_effects(value, seen=seen)


def _is_pure_torch(value: Any) -> bool:
    """Return whether this is a known torch function, or a torch loss module without hooks."""
    if isinstance(value, torch.nn.Module):
        is_hooked = value._forward_hooks or value._forward_pre_hooks
        return type(value).__module__ == _TORCH_LOSSES and not is_hooked
    is_torch_function = isinstance(value, BuiltinFunctionType | FunctionType) and _is_torch_or_math(
        str(value.__module__)
    )
    return is_torch_function and value.__name__ in _PURE_TORCH_NAMES


def _is_torch_or_math(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "math")


def _is_unsafe(function: FunctionType, instruction: dis.Instruction) -> bool:
    """Return whether this instruction writes to shared state, or uses an attribute not in `_PURE_TORCH_NAMES`."""
    writes_cell = instruction.opname == "STORE_DEREF" and instruction.argval in function.__code__.co_freevars
    return (
        instruction.opname in _WRITE_OPCODES
        or writes_cell
        or (instruction.opname in _NAME_OPCODES and instruction.argval not in _PURE_TORCH_NAMES)
    )


def _is_empty(cell: Any) -> bool:
    """Return whether a closure cell has no value yet, or the value None."""
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _slice_samples(value: Any, size: int, part: slice) -> Any:
    """Return a copy of these samples of a value, or None if a tensor's first dimension is not `size`."""
    if type(value) is Tensor:
        return value.detach()[part].clone() if value.dim() and value.shape[0] == size else None
    if type(value) in (tuple, list):
        items = [_slice_samples(item, size, part) for item in value]
        return None if any(item is None for item in items) else type(value)(items)
    if type(value) is dict:
        sliced = {name: _slice_samples(item, size, part) for name, item in value.items()}
        return None if any(item is None for item in sliced.values()) else sliced
    return None


def _cuda_devices(output: Tensor) -> list[int]:
    return [output.device.index or 0] if output.device.type == "cuda" else []


def _as_numbers(pair: Any) -> tuple[float, float] | None:
    """Return a `(sum, count)` as two floats, or None if `pair` is not a pair of numbers."""
    if isinstance(pair, Mapping) or not isinstance(pair, tuple | list) or len(pair) != 2:
        return None
    numbers = [as_number(item.detach() if isinstance(item, Tensor) else item) for item in pair]
    return None if any(number is None for number in numbers) else (float(numbers[0] or 0), float(numbers[1] or 0))


def _is_close(first: float, second: float, allowed: float) -> bool:
    return abs(first - second) <= allowed
