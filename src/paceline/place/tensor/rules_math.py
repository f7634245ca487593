"""Elementwise functions, reductions, norms and dropout."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.place.tensor.cut import Cut
from paceline.place.tensor.rules_shape import like, need, positive
from paceline.place.tensor.split import Split, Unknown, derived, listens, on_whole, operand, rule
from paceline.place.tensor.wire import Wire, copy_in, piece, reduce_out

BINARY = "add sub mul div true_divide floor_divide remainder fmod pow rsub maximum minimum atan2 eq ne lt le gt ge"
UNARY = (
    "abs neg exp expm1 log log1p log2 sqrt rsqrt square reciprocal sin cos tan tanh sigmoid erf sign floor ceil round "
    "clamp clip clamp_min clamp_max nan_to_num isnan isinf isfinite relu relu6 gelu silu mish elu selu celu leaky_relu "
    "hardtanh hardswish hardsigmoid softplus softsign logsigmoid threshold tanhshrink positive logical_not bitwise_not "
    "masked_fill where addcmul addcdiv lerp logical_and logical_or bitwise_and bitwise_or erfc sinh cosh trunc frac"
)
DUNDER = "add radd sub rsub mul rmul truediv rtruediv floordiv pow rpow mod neg pos abs eq ne lt le gt ge and or invert"


@rule(*BINARY.split(), *UNARY.split(), *(f"__{name}__" for name in DUNDER.split()))
def elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    """Every operand's own piece; what broadcasts over the cut dimension is read as it is."""
    if kwargs.get("out") is not None or (func.__name__ == "where" and len(args) + len(kwargs) == 1):
        raise Unknown  # where(condition) are its nonzero's places
    tensors = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor)]
    first = next(t for t in tensors if isinstance(t, Split))
    dim = first.cut.dim - len(first.whole)
    own = [operand(a, of=first, dim=dim) for a in args]
    named = {key: operand(a, of=first, dim=dim) for key, a in kwargs.items()}
    wire, origins = derived(t for t in tensors if isinstance(t, Split))
    made = func(*own, **named)
    return Split.of(made, first.cut.at(made.dim() + dim), wire, origins=origins)


IN_PLACE = "add sub mul div pow clamp masked_fill relu neg exp tanh sigmoid zero fill copy clamp_min clamp_max"
IN_PLACE_DUNDER = "iadd isub imul itruediv"


@rule(*(f"{name}_" for name in IN_PLACE.split()), *(f"__{name}__" for name in IN_PLACE_DUNDER.split()))
def _in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Into a piece: its operands' pieces. Into a whole tensor: whole operands."""
    x = args[0]
    if not isinstance(x, Split):
        return on_whole(func, args, kwargs, name=func.__name__)
    dim = x.cut.dim - len(x.whole)
    func(x.local, *(operand(a, of=x, dim=dim) for a in args[1:]), **kwargs)
    x.joined.clear()
    return x


def _dims(args: Any, kwargs: Any, ndim: int) -> list[int] | None:
    given = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis"))
    if given is None or isinstance(given, torch.dtype):
        return None
    return [positive(d, ndim) for d in (given if isinstance(given, tuple | list) else (given,))]


@rule("sum", "mean", "amax", "amin", "var", "std", "logsumexp", "norm", "prod", "all", "any", "max", "min", "cumsum",
      "vector_norm", "sort", "topk", "flip")  # fmt: skip
def _reduce(func: Any, args: Any, kwargs: Any) -> Any:
    x, name = need(args[0]), func.__name__
    if name == "topk":
        dims: list[int] | None = _dims((x, *args[2:3]), kwargs, len(x.whole)) or [len(x.whole) - 1]
    elif name == "norm":
        dims = _dims((x, *args[2:3]), kwargs, len(x.whole))
    else:
        dims = _dims(args, kwargs, len(x.whole)) or ([len(x.whole) - 1] if name == "sort" else None)
    if len(args) > 1 and isinstance(args[1], Tensor):
        return elementwise(func, args, kwargs)
    if dims is None or x.cut.dim in dims:
        return _over_the_cut(func, x, args, kwargs)
    made = func(x.local, *args[1:], **kwargs)
    gone = sum(d < x.cut.dim for d in dims)
    if isinstance(made, Tensor):
        return like(x, made, x.cut.at(x.cut.dim - (gone if made.dim() < len(x.whole) else 0)))
    parts = [like(x, p, x.cut.at(x.cut.dim - (gone if p.dim() < len(x.whole) else 0))) for p in made]
    return type(made)(parts)


def _over_the_cut(func: Any, x: Split, args: Any, kwargs: Any) -> Any:
    """Sums are added over the ranks; a mean is a sum, divided."""
    if func.__name__ not in ("sum", "mean") or not x.local.is_floating_point() or listens(x):
        raise Unknown  # a plan does not cut what the next norm sums over
    partial = torch.sum(x.local, *args[1:], **kwargs)
    total = reduce_out(partial, x.wire)
    if func.__name__ == "sum":
        return total
    dims = _dims(args, kwargs, len(x.whole)) or range(len(x.whole))
    count = 1
    for d in dims:
        count *= x.whole[d]
    return total / count


@rule("layer_norm", "rms_norm")
def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    x = need(args[0])
    shape = args[1] if len(args) > 1 else kwargs["normalized_shape"]
    if x.cut.dim >= len(x.whole) - len(shape):
        raise Unknown
    read = [copy_in(a, x.wire) if isinstance(a, Tensor) else a for a in args[1:]]
    named = {key: copy_in(a, x.wire) if isinstance(a, Tensor) else a for key, a in kwargs.items()}
    return like(x, func(x.local, *read, **named), x.cut)


@rule("dropout")
def _dropout(func: Any, args: Any, kwargs: Any) -> Any:
    """The whole tensor's draws, of which each rank uses its own: equal to one process, and all ranks stay in step."""
    x = need(args[0])
    p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
    training = args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True))
    if not training or p == 0.0:
        return x
    return like(x, x.local * own_draws(x.local, p, x.cut, x.wire), x.cut)


def own_draws(local: Tensor, p: float, cut: Cut, wire: Wire) -> Tensor:
    """A dropout mask for the whole, drawn in the order in which the whole tensor's memory lies; this rank's piece."""
    shape = [cut.size if d == cut.dim else n for d, n in enumerate(local.shape)]
    strides = local.stride()
    order = sorted(range(local.dim()), key=lambda d: (-strides[d], d)) if not local.is_contiguous() else None
    with torch.no_grad():
        if order is None:
            ones = torch.ones(shape, dtype=local.dtype, device=local.device)
        else:
            laid = torch.ones([shape[d] for d in order], dtype=local.dtype, device=local.device)
            ones = laid.permute([order.index(d) for d in range(local.dim())])
        return piece(F.dropout(ones, p), cut, wire.rank)
