"""Detection of random draws that have a different size on a shard than on the full sequence."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from paceline.errors import LayoutError
from paceline.torch_internals.dispatch_modes import OpObserver
from paceline.torch_internals.function_signatures import bind_arguments

_LIBRARY_FILES = (str(Path(__file__).parents[1]), "torch_internals/dispatch_modes.py")
_HINT = (
    "use nn.Dropout or F.dropout, which draw for the whole sequence (to drop whole tokens, apply F.dropout to "
    "torch.ones(batch, sequence, 1)); or draw once per sample; or draw the numbers in the dataset; or leave cp out"
)


@dataclass(frozen=True, kw_only=True)
class RandomOp:
    """A random operation: the shape of its result, and the line (`file:number`) of the model's code that called it."""

    shape: tuple[int, ...]
    line: str


class NoAttentionDropout(TorchFunctionMode):
    """A mode that turns off the dropout of `F.scaled_dot_product_attention`.

    This dropout needs no check, because each rank draws it for the full sequence. A check would also need a random
    number for each pair of positions. The dropout of `nn.MultiheadAttention` stays on.
    """

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call the function. If it is `F.scaled_dot_product_attention`, call it with a dropout rate of zero."""
        is_attention = func is F.scaled_dot_product_attention
        arguments = bind_arguments("scaled_dot_product_attention", args, dict(kwargs or {})) if is_attention else None
        return func(*args, **(kwargs or {})) if arguments is None else func(**arguments | {"dropout_p": 0.0})


@contextmanager
def record_random_ops() -> Iterator[list[RandomOp]]:
    """Return a context that records every random operation of this thread, in order."""
    random_ops: list[RandomOp] = []

    def record(_: Any, __: Any, kwargs: Mapping[str, Any], result: Any, has_drawn: bool) -> None:
        first = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(first, Tensor) and (has_drawn or isinstance(kwargs.get("generator"), torch.Generator)):
            random_ops.append(RandomOp(shape=tuple(first.shape), line=_user_line()))

    with OpObserver(record):
        yield random_ops


def find_random_op_error(full_ops: Sequence[RandomOp], shard_ops: Sequence[Sequence[RandomOp]]) -> LayoutError | None:
    """Return an error for the first operation that draws a different number of elements on a shard, or None."""
    for ops in shard_ops:
        for full_op, shard_op in zip(full_ops, ops, strict=False):
            if torch.Size(full_op.shape).numel() != torch.Size(shard_op.shape).numel():
                return LayoutError(
                    f"in training this model draws random numbers of shape {shard_op.shape} on a part of the sequence, "
                    f"where one process draws {full_op.shape}.",
                    where=shard_op.line,
                    cause="random numbers drawn for a part alone differ from those of one process",
                    hint=_HINT,
                )
    return None


def hidden_draws_error() -> LayoutError:
    """Return the error for different random draws that `record_random_ops` does not see, such as those of numpy."""
    return LayoutError(
        "in training mode this model draws a different number of random numbers on a part of the sequence than on the "
        "whole.",
        cause="a draw for each position from random or numpy.random, or a branch that depends on the part",
        hint=_HINT,
    )


def _user_line() -> str:
    """Return `file:number` of the innermost line on the stack that is neither in torch nor in this library."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "/torch/" not in file and not file.startswith(_LIBRARY_FILES[0]) and not file.endswith(_LIBRARY_FILES[1]):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return "this model's forward"
