"""A probe that detects a loss that returns a mean instead of a sum. It runs once, only on a loss without side effects.

`(F.cross_entropy(output, target), len(target))` trains at a learning rate that is too small by the count. The halves
of a microbatch add up to the whole for a sum; for a mean, only after each is multiplied by its count.
"""

import builtins
import dis
from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.torch_internals.scalars import as_number

_PURE = (
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
_TORCH = frozenset(
    [
        "abs", "argmax", "bfloat16", "binary_cross_entropy", "binary_cross_entropy_with_logits", "clamp",
        "contiguous", "cross_entropy", "dim", "double", "dtype", "exp", "expand", "flatten", "float", "float32",
        "functional", "huber_loss", "ignore_index", "item", "kl_div", "l1_loss", "log", "log_softmax", "logits",
        "long", "mean", "mse_loss", "ne", "nll_loss", "nn", "numel", "one_hot", "permute", "pow", "reshape",
        "shape", "sigmoid", "size", "smooth_l1_loss", "softmax", "sqrt", "square", "squeeze", "sum", "t",
        "tanh", "transpose", "unsqueeze", "view",
    ]
)  # fmt: skip
_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_TORCH_LOSSES = "torch.nn.modules.loss"
_NAMED = frozenset({"LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "LOAD_SUPER_ATTR"})
_WRITES = frozenset(
    {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "YIELD_VALUE", "IMPORT_NAME"}
)
_TOLERANCE = 1e-2  # half precision's rounding over a microbatch; a mean and a sum are at least a factor of 2 apart


def gives_mean(loss: Any, output: Any, batch: Any, found: tuple[Tensor, Any]) -> bool:
    """Return whether `loss(output, batch)`, which gave `found`, returns a mean with its count.

    The loss runs on each half of the microbatch, without gradients. If that could have side effects, or the microbatch
    cannot be halved, the loss does not run, and the result is False.
    """
    if not keeps_nothing(loss):
        return False
    size = output.shape[0] if type(output) is Tensor and output.dim() else 0
    parts = [
        (_cut(output, size, part), _cut(batch, size, part)) for part in (slice(0, size // 2), slice(size // 2, size))
    ]
    if size < 2 or any(cut is None for pair in parts for cut in pair):
        return False
    try:
        with torch.no_grad(), torch.random.fork_rng(_devices(output)):
            halves = [_numbers(loss(*pair)) for pair in parts]
    except Exception:  # the user's code need not accept half a microbatch
        return False
    whole = _numbers(found)
    if whole is None or any(half is None for half in halves):
        return False
    (total, count), (first, one), (second, other) = whole, *(half for half in halves if half is not None)
    is_counted = one > 0 and other > 0 and one + other == count
    return is_counted and not _near(first + second, total) and _near(first * one + second * other, total * count)


def keeps_nothing(function: Any, *, seen: frozenset[int] = frozenset()) -> bool:
    """Return whether another call of a function has no visible side effect, on this rank or another.

    The function must write nothing and reach only constants, functions like it, and torch operations known only to
    compute: no collective, random draw or in-place update. If in doubt, the result is False.
    """
    if isinstance(function, partial):
        values = [*function.args, *function.keywords.values()]
        return keeps_nothing(function.func, seen=seen) and all(_is_plain(value, seen) for value in values)
    if _computes(function):
        return True
    if not isinstance(function, FunctionType):
        return False
    if id(function) in seen:
        return True
    takes_out = any("out" in const for const in function.__code__.co_consts if isinstance(const, tuple))
    if takes_out or any(_does_more(function, step) for step in dis.get_instructions(function)):
        return False
    seen |= {id(function)}
    held = [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return all(_is_plain(value, seen) for value in held) and all(
        _reaches_plain(name, function, seen) for name in _globals_in(function)
    )


def _globals_in(function: FunctionType) -> list[str]:
    return [str(step.argval) for step in dis.get_instructions(function) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")]


def _reaches_plain(name: str, function: FunctionType, seen: frozenset[int]) -> bool:
    if name in function.__globals__:
        return _is_plain(function.__globals__[name], seen)
    return getattr(builtins, name, None) in _PURE


def _is_plain(value: Any, seen: frozenset[int]) -> bool:
    if isinstance(value, tuple):
        return all(_is_plain(each, seen) for each in value)
    if isinstance(value, ModuleType):
        return _is_of_torch(value.__name__)
    return isinstance(value, _VALUES) or keeps_nothing(value, seen=seen)


def _computes(value: Any) -> bool:
    """Return whether this is a known torch function, or a torch loss module without hooks."""
    if isinstance(value, torch.nn.Module):
        is_hooked = value._forward_hooks or value._forward_pre_hooks
        return type(value).__module__ == _TORCH_LOSSES and not is_hooked
    is_torchs = isinstance(value, BuiltinFunctionType | FunctionType) and _is_of_torch(str(value.__module__))
    return is_torchs and value.__name__ in _TORCH


def _is_of_torch(name: str) -> bool:
    return name.partition(".")[0] in ("torch", "math")


def _does_more(function: FunctionType, step: dis.Instruction) -> bool:
    """Return whether this instruction writes to shared state, or names something not known only to compute."""
    writes_cell = step.opname == "STORE_DEREF" and step.argval in function.__code__.co_freevars
    return step.opname in _WRITES or writes_cell or (step.opname in _NAMED and step.argval not in _TORCH)


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _cut(value: Any, size: int, part: slice) -> Any:
    """Return a copy of these samples of a value, or None if a tensor's first dimension is not `size`."""
    if type(value) is Tensor:
        return value.detach()[part].clone() if value.dim() and value.shape[0] == size else None
    if type(value) in (tuple, list):
        parts = [_cut(each, size, part) for each in value]
        return None if any(each is None for each in parts) else type(value)(parts)
    if type(value) is dict:
        found = {name: _cut(each, size, part) for name, each in value.items()}
        return None if any(each is None for each in found.values()) else found
    return None


def _devices(output: Tensor) -> list[int]:
    return [output.device.index or 0] if output.device.type == "cuda" else []


def _numbers(pair: Any) -> tuple[float, float] | None:
    if isinstance(pair, Mapping) or not isinstance(pair, tuple | list) or len(pair) != 2:
        return None
    numbers = [as_number(each.detach() if isinstance(each, Tensor) else each) for each in pair]
    return None if any(number is None for number in numbers) else (float(numbers[0] or 0), float(numbers[1] or 0))


def _near(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * abs(other)
