"""Does a loss give a mean where a sum is promised? Asked once, of a loss that nobody can see being asked.

`(F.cross_entropy(output, target), len(target))` trains at a rate that is too small by the count. Of a sum, the halves
of a microbatch add up to the whole; of a mean, they do so once each is multiplied by its count.
"""

import builtins
import dis
from collections.abc import Callable, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor

from paceline.scalar import as_number

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
_VALUES = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_TORCH_LOSSES = "torch.nn.modules.loss"
_WRITES = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "STORE_SUBSCR", "DELETE_SUBSCR", "YIELD_VALUE"})
_TOLERANCE = 1e-2  # half precision's rounding over a microbatch; a mean and a sum are at least a factor of 2 apart


def gives_mean(loss: Any, output: Any, batch: Any, found: tuple[Tensor, Any]) -> bool:
    """Whether `loss(output, batch)`, which gave `found`, is a mean beside its count.

    The loss runs on each half of the microbatch, without gradients. Where that could be noticed, or the microbatch
    can't be halved, it does not run, and the answer is False.
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
    except Exception:  # whatever the user's code makes of half a microbatch, it was not asked to take one
        return False
    whole = _numbers(found)
    if whole is None or any(half is None for half in halves):
        return False
    (total, count), (first, one), (second, other) = whole, *(half for half in halves if half is not None)
    is_counted = one > 0 and other > 0 and one + other == count
    return is_counted and not _near(first + second, total) and _near(first * one + second * other, total * count)


def keeps_nothing(function: Any, *, seen: frozenset[int] = frozenset()) -> bool:
    """Whether calling a function once more changes nothing that anybody could see: it writes nothing, prints nothing,
    and reaches only torch, constants and functions like it. Doubt is a no."""
    if isinstance(function, partial):
        values = [*function.args, *function.keywords.values()]
        return keeps_nothing(function.func, seen=seen) and all(_is_plain(value, seen) for value in values)
    if _is_torchs(function) or type(function).__module__ == _TORCH_LOSSES:
        return True
    if not isinstance(function, FunctionType):
        return False
    if id(function) in seen:
        return True
    if any(step.opname in _WRITES or _writes_cell(function, step) for step in dis.get_instructions(function)):
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
        return value.__name__.partition(".")[0] in ("torch", "math")
    return isinstance(value, _VALUES) or type(value) is Tensor or keeps_nothing(value, seen=seen)


def _is_torchs(value: Any) -> bool:
    is_function = isinstance(value, BuiltinFunctionType | FunctionType | type)
    return is_function and str(getattr(value, "__module__", "")).partition(".")[0] in ("torch", "math")


def _writes_cell(function: Callable[..., Any], step: dis.Instruction) -> bool:
    return step.opname == "STORE_DEREF" and step.argval in function.__code__.co_freevars


def _is_empty(cell: Any) -> bool:
    try:
        return cell.cell_contents is None
    except ValueError:
        return True


def _cut(value: Any, size: int, part: slice) -> Any:
    """A copy of these samples of a value; None where one of its tensors has not `size` in its first dimension."""
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
