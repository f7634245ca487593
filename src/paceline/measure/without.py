"""The one table of what operations give where their numbers are not there, and where shapes alone mislead."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _number(func: Any, args: Any, kwargs: Any) -> Any:
    """A number that is not there is one; integers and booleans are there."""
    return 1.0 if args[0].is_floating_point() else func(*args, **kwargs)


def _yes(func: Any, args: Any, kwargs: Any) -> bool:
    return True


ANSWERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "aten::_local_scalar_dense": _number,
    "aten::equal": _yes,
    "aten::is_nonzero": _yes,
    "aten::allclose": _yes,
}
_COMPARES = {"aten::gt", "aten::ge", "aten::lt", "aten::le", "aten::eq"}
_POSITIONS = {"aten::topk", "aten::sort", "aten::argsort", "aten::argmax", "aten::argmin", "aten::max", "aten::min"}
_POSITIONS |= {"aten::multinomial"}


def choose(func: Any, tensor: Tensor, args: Any, *, holds: bool) -> None:
    """Fill integers and booleans that come of numbers which are not there.

    Everything is finite; of positions each is chosen as often as any other, so that experts get equally many tokens.
    `holds` is what comparisons come to: in a step they hold, while a model is built they don't, or draws that are
    repeated until all are within bounds would never end.
    """
    name = func._schema.name
    if name in _POSITIONS and tensor.dtype is torch.int64:
        _in_turn(tensor, args)
    elif name == "aten::isfinite" or (holds and name in _COMPARES):
        tensor.fill_(1)
    else:
        tensor.zero_()


def _in_turn(tensor: Tensor, args: Any) -> None:
    source: Tensor = args[0]
    numbers = [arg for arg in args[1:] if isinstance(arg, int) and not isinstance(arg, bool)]
    dim = numbers[-1] if numbers and -source.dim() <= numbers[-1] < source.dim() else -1
    among = source.shape[dim] if source.dim() else 1
    tensor.copy_((torch.arange(tensor.numel()) % max(among, 1)).view(tensor.shape))


def shaped(func: Any, args: Any, kwargs: Any) -> Any:
    """Its results on `meta`, as the operation really gives them where that is not what it says itself."""
    corrected = _CORRECTED.get(func._schema.name)
    return func(*args, **kwargs) if corrected is None else corrected(func, args, kwargs)


def _grouped(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Without memory it takes bf16 only; with it, what it is given."""
    kind = kwargs.get("out_dtype") or args[0].dtype
    halves = tuple(arg.bfloat16() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in args)
    found: Tensor = func(*halves, **{name: value for name, value in kwargs.items() if name != "out_dtype"})
    return found.to(kind)


_FEW, _MORE, _PAGE = 8, 24, 4096


def _recurrent(func: Any, args: Any, kwargs: Any) -> Any:
    """Its workspace is left out without memory: found on few positions, since it grows by the same with each."""
    inputs, rest = args[0], args[1:]
    output, hidden, cell, kept = func(*args, **kwargs)
    positions = inputs.shape[0]

    def workspace(length: int) -> int:
        real = [_real(inputs[:length]), *(_real(arg) if isinstance(arg, Tensor) else arg for arg in rest)]
        found = func(*real, **kwargs)[3]
        return 0 if found is None else int(found.numel())  # without gradients there is none

    if positions <= _MORE:
        num_bytes = workspace(positions)
    else:
        few, more = workspace(_FEW), workspace(_MORE)
        num_bytes = more + (more - few) * (positions - _MORE) // (_MORE - _FEW)
        num_bytes = -(-num_bytes // _PAGE) * _PAGE
    return output, hidden, cell, torch.empty(num_bytes, dtype=torch.uint8, device="meta") if num_bytes else kept


def _real(tensor: Tensor) -> Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


_CORRECTED = {"aten::_grouped_mm": _grouped, "aten::mkldnn_rnn_layer": _recurrent}
