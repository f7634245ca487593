"""Arguments for the functions with a tensor rule: by name, each tensor sharded along each dimension."""

import itertools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.parallel.tensor_parallel.rules.elementwise import ELEMENTWISE, IN_PLACE
from tests.parallel.tensor_parallel.rule_calls import (
    SHAPE,
    Cuttable,
    Spelling,
    draw,
    function_name,
    is_taken,
    mark,
    spellings,
)

Given = dict[str, Any]
WHOLE = draw(*SHAPE).flip(0)


def cases(*, every: int = 1) -> Iterator[Spelling]:
    """Every call that torch takes, in the same order each time; of each function the first and each `every`th."""
    laid = (spelling for name, given in by_signature() for spelling in spellings(name, given))
    seen: dict[str, int] = {}
    for spelling in itertools.chain(laid, elementwise(), others()):
        number = seen.get(spelling.name, 0)
        if number % every == 0 and not is_taken(spelling):
            continue
        seen[spelling.name] = number + 1
        if number % every == 0:
            yield spelling


def _cut(dim: int | None, *shape: int) -> Cuttable:
    return Cuttable(draw(*(shape or SHAPE)), dim)


def by_signature() -> Iterator[tuple[str, Given]]:
    """Functions whose signature the table has."""
    for dim in range(3):
        for name, given in itertools.chain(_reductions(), _shapes(), _parts()):
            yield name, {"input": _cut(dim), **given}
        for name in ("cat", "concat", "concatenate", "stack"):
            for along in (0, 1, -1):
                yield name, {"tensors": (_cut(dim), _cut(dim)), "dim": along}
            yield name, {"tensors": [_cut(None), _cut(dim)], "dim": 0}
        for name in ("max", "min"):
            yield name, {"input": _cut(dim), "other": Cuttable(WHOLE, None)}
            yield name, {"input": _cut(None), "other": Cuttable(WHOLE, dim)}
    yield from _products()
    yield from _losses()


def _reductions() -> Iterator[tuple[str, Given]]:
    for name in ("sum", "mean", "amax", "amin", "std", "var", "all", "any", "logsumexp"):
        yield name, {}
        for dim in (0, 1, -1, (0, 1), (1, 2), (0, -1)):
            yield name, {"dim": dim}
            yield name, {"dim": dim, "keepdim": True}
    for name in ("std", "var"):
        yield name, {"unbiased": False}
        yield name, {"dim": 1, "unbiased": False, "keepdim": True}
        yield name, {"dim": (0, 2), "correction": 0}
    for name in ("max", "min", "prod", "argmax", "cumsum", "sort"):
        yield name, {}
        for dim in (0, 1, -1):
            yield name, {"dim": dim}
            yield name, {"dim": dim, "keepdim": True}
    for name in ("sum", "mean", "prod", "cumsum", "softmax", "log_softmax"):
        yield name, {"dim": 1, "dtype": torch.float32}
        yield name, {"dtype": torch.float32}
    for dim in (0, 1, -1, -2):
        yield "softmax", {"dim": dim}
        yield "log_softmax", {"dim": dim}
        yield "sort", {"dim": dim, "descending": True}
        yield "sort", {"dim": dim, "stable": True}
        yield "topk", {"k": 2, "dim": dim}
        yield "topk", {"k": 1, "dim": dim, "largest": False}
        for order in (1, 2, float("inf")):
            yield "norm", {"p": order, "dim": dim}
            yield "linalg_vector_norm", {"ord": order, "dim": dim, "keepdim": True}
    yield "norm", {}
    yield "linalg_vector_norm", {"ord": 2}
    yield "topk", {"k": 3}
    for dims in ((0,), (1,), (2,), (-1,), (0, 1), (1, 2), (0, 2), (1, -1), (0, 1, 2), ()):
        yield "flip", {"dims": dims}
    for shape in ((5,), (6, 5)):
        weight = Cuttable(draw(*shape), None)
        yield "layer_norm", {"normalized_shape": shape}
        yield "layer_norm", {"normalized_shape": list(shape), "weight": weight, "bias": weight, "eps": 1e-3}
        yield "rms_norm", {"normalized_shape": shape, "weight": weight, "eps": 1e-3}
    yield "dropout", {"p": 0.3, "training": False}
    yield "dropout", {"p": 0.0, "training": True, "inplace": True}


def _shapes() -> Iterator[tuple[str, Given]]:
    for size in ((4, 30), (24, 5), (2, 2, 6, 5), (4, 3, 2, 5), (4, 2, 3, 5), (-1,), (4, -1, 1, 5), (120,), (6, 20)):
        yield "view", {"size": size}
        yield "reshape", {"shape": size}
    like = Cuttable(draw(24, 5), None)
    yield "view_as", {"other": like}
    yield "reshape_as", {"other": like}
    for start, end in ((0, 1), (1, 2), (0, -1), (-2, -1), (1, 1)):
        yield "flatten", {"start_dim": start, "end_dim": end}
    yield "flatten", {"start_dim": 1}
    yield "flatten", {}
    for dim, sizes in ((0, (2, 2)), (1, (3, -1)), (-2, (2, 3)), (2, (1, 5))):
        yield "unflatten", {"dim": dim, "sizes": sizes}
    for a, b in ((0, 1), (-1, 0), (1, -1), (2, 2)):
        for name in ("transpose", "swapaxes", "swapdims"):
            yield name, {"dim0": a, "dim1": b}
        for name in ("movedim", "moveaxis"):
            yield name, {"source": a, "destination": b}
    yield "movedim", {"source": (0, 1), "destination": (1, 2)}
    for dims in ((2, 1, 0), (0, -1, 1), (1, 2, 0)):
        yield "permute", {"dims": dims}
    for dim in (0, 1, -1, 3):
        yield "unsqueeze", {"dim": dim}
    for size in ((4, 6, 5), (2, 4, 6, 5), (-1, -1, 5), (3, -1, 6, 5)):
        yield "expand", {"size": size}
        yield "broadcast_to", {"size": size}
    yield "expand_as", {"other": Cuttable(draw(2, 4, 6, 5), None)}
    for dim in (0, 1, -1):
        yield "repeat_interleave", {"repeats": 2, "dim": dim}
    yield "repeat_interleave", {"repeats": 2}
    yield "repeat_interleave", {"repeats": torch.tensor([1, 2, 0, 1]), "dim": 0}
    yield "squeeze", {}
    for dim in ((0,), (1,), (0, 1), (-1,)):
        yield "squeeze", {"dim": dim}
    yield "stride", {}
    yield "stride", {"dim": -2}
    yield "size", {}
    yield "size", {"dim": 1}
    yield "size", {"dim": -1}


def _parts() -> Iterator[tuple[str, Given]]:
    for dim in (0, 1, -1, -2):
        yield "split", {"split_size": 2, "dim": dim}
        yield "split", {"split_size": 4, "dim": dim}
        yield "chunk", {"chunks": 2, "dim": dim}
        yield "tensor_split", {"number": 3, "dim": dim}
        yield "tensor_split", {"number": (1, 3), "dim": dim}
        yield "narrow", {"dim": dim, "start": 1, "length": 2}
        yield "narrow", {"dim": dim, "start": -2, "length": 1}
        yield "select", {"dim": dim, "index": 1}
        yield "select", {"dim": dim, "index": -1}
        yield "unbind", {"dim": dim}
        yield "index_select", {"dim": dim, "index": torch.tensor([3, 0, 0])}
    yield "split", {"split_size": [1, 5], "dim": 1}
    yield "split_with_sizes", {"split_size": [1, 5], "dim": 1}
    yield "split", {"split_size": 2}
    yield "chunk", {"chunks": 2}
    yield "unbind", {}


def _products() -> Iterator[tuple[str, Given]]:
    for a, b in itertools.product((None, 0, 1), repeat=2):
        if a is None and b is None:
            continue
        x, w, bias = _cut(a, 6, 4), _cut(b, 4, 5), Cuttable(draw(5), None)
        for name in ("matmul", "__matmul__", "__rmatmul__"):
            yield name, {"input": x, "other": w}
        yield "mm", {"input": x, "mat2": w}
        yield "addmm", {"input": bias, "mat1": x, "mat2": w}
        yield "addmm", {"input": bias, "mat1": x, "mat2": w, "beta": 0.5, "alpha": 2}
        yield "linear", {"input": x, "weight": _cut(b, 5, 4)}
        yield "linear", {"input": x, "weight": _cut(b, 5, 4), "bias": bias}
        yield "einsum", {"equation": "ab,bc->ac", "operands": (x, w)}
        yield "einsum", {"equation": "ab, bc -> ca", "operands": (x, w)}
    for a, b in itertools.product((None, 0, 1, 2), repeat=2):
        if a is None and b is None:
            continue
        x, w = _cut(a, 4, 6, 4), _cut(b, 4, 4, 5)
        yield "matmul", {"input": x, "other": w}
        yield "bmm", {"input": x, "mat2": w}
        yield "baddbmm", {"input": _cut(None, 4, 6, 5), "batch1": x, "batch2": w, "beta": 2}
        yield "baddbmm", {"input": _cut(a, 4, 6, 5), "batch1": x, "batch2": w}
    ids = Cuttable(torch.tensor([[0, 6, 3], [3, 5, 1]]), None)
    for dim, more in itertools.product(
        (0, 1), ({}, {"padding_idx": 3}, {"padding_idx": -2}, {"scale_grad_by_freq": True})
    ):
        yield "embedding", {"input": ids, "weight": _cut(dim, 7, 4), **more}
    for dim in range(4):
        q, kv = _cut(dim, 2, 4, 3, 6), Cuttable(draw(2, 4, 3, 6), None)
        mask = Cuttable(draw(3, 3), None)
        for more in (
            {},
            {"is_causal": True},
            {"attn_mask": mask},
            {"scale": 0.3},
            {"dropout_p": 0.0, "enable_gqa": True},
        ):
            yield "scaled_dot_product_attention", {"query": q, "key": kv, "value": kv, **more}
        few = Cuttable(draw(2, 2, 3, 6), dim if dim != 3 else None)
        yield "scaled_dot_product_attention", {"query": q, "key": few, "value": few, "enable_gqa": True}


def _losses() -> Iterator[tuple[str, Given]]:
    target, weight = torch.tensor([0, 6, -100, 5, 2]), draw(7).abs()
    some: list[Given] = [
        {}, {"reduction": "sum"}, {"reduction": "none"}, {"weight": weight}, {"ignore_index": 5, "reduction": "sum"}
    ]  # fmt: skip
    for dim, more in itertools.product((0, 1), some):
        aim = target.clamp(min=0) if "ignore_index" in more else target
        for name in ("cross_entropy", "nll_loss"):
            yield name, {"input": _cut(dim, 5, 7), "target": aim, **more}
        yield "cross_entropy", {"input": _cut(dim, 5, 7), "target": aim, "label_smoothing": 0.1, **more}
        yield "cross_entropy", {"input": _cut(dim, 5, 7, 1), "target": aim[:, None], **more}
    yield "cross_entropy", {"input": _cut(1, 5, 7), "target": Cuttable(draw(5, 7).softmax(1), None)}
    yield "nll_loss", {"input": _cut(1, 5, 7), "target": target, "size_average": False}


# -- elementwise


NUMBERS: dict[str, list[tuple[tuple[Any, ...], Given]]] = {
    "clamp": [((-0.5, 0.5), {}), ((), {"min": 0.1}), ((), {"max": 0.1}), ((Cuttable(WHOLE, None),), {})],
    "clip": [((-0.5, 0.5), {}), ((), {"min": 0.1, "max": 1.0})],
    "clamp_min": [((0.1,), {}), ((), {"min": 0.2}), ((Cuttable(WHOLE, None),), {})],
    "clamp_max": [((0.1,), {}), ((), {"max": 0.2})],
    "nan_to_num": [((), {}), ((1.0,), {}), ((), {"nan": 2.0, "posinf": 1.0})],
    "round": [((), {}), ((), {"decimals": 1})],
    "gelu": [((), {}), ((), {"approximate": "tanh"})],
    "leaky_relu": [((), {}), ((0.2,), {}), ((), {"negative_slope": 0.2})],
    "elu": [((), {}), ((0.5,), {})],
    "celu": [((), {}), ((0.5,), {})],
    "hardtanh": [((), {}), ((-0.5, 0.7), {}), ((), {"min_val": -0.2})],
    "softplus": [((), {}), ((2.0,), {}), ((), {"threshold": 0.5})],
    "threshold": [((0.1, 2.0), {}), ((), {"threshold": 0.1, "value": 1.0})],
    "masked_fill": [((Cuttable(WHOLE > 0, None), 2.0), {}), ((), {"mask": Cuttable(WHOLE > 0, None), "value": 1.0})],
    "addcmul": [((Cuttable(WHOLE, None), Cuttable(WHOLE, None)), {"value": 2})],
    "addcdiv": [((Cuttable(WHOLE, None), Cuttable(WHOLE, None)), {"value": 2})],
    "lerp": [((Cuttable(WHOLE, None), 0.3), {}), ((), {"end": Cuttable(WHOLE, None), "weight": 0.4})],
    "where": [((Cuttable(WHOLE > 0, None), 1.0), {}), ((Cuttable(WHOLE > 0, None), Cuttable(WHOLE, None)), {})],
}
KINDS = ("bitwise", "logical", "and", "or", "invert")


def elementwise() -> Iterator[Spelling]:
    """Functions of one, two or three operands: of each the piece, of each the whole, in place and not."""
    dims = itertools.cycle(range(3))
    for name in (*ELEMENTWISE, *IN_PLACE):
        plain = name.strip("_") if name.startswith("__") else name.rstrip("_")
        plain = plain.removeprefix("i") if name.startswith("__i") and name != "__invert__" else plain
        for where, function in _named(name):
            for args, kwargs in _operands(plain):
                dim = next(dims)
                value = (draw(*SHAPE) * 4).long() if plain.startswith(KINDS) else draw(*SHAPE)
                x = Cuttable(value > 0 if plain.startswith("logical") else value, dim)
                operands = tuple(_along(a, dim) for a in args)
                forms = [((x, *operands), kwargs), ((x, *args), {k: _along(v, dim) for k, v in kwargs.items()})]
                if where == "F" and not name.endswith("_"):
                    forms.append(((x, *args), {**kwargs, "inplace": True}))
                if where != "Tensor":
                    forms.append((args, {"input": x, **kwargs}) if not args else ((x, *args), kwargs))
                if len(args) == 1 and isinstance(args[0], Cuttable):
                    forms += [((args[0], x), kwargs), ((x,), {"other": args[0], **kwargs})]
                yield from _sound(name, where, function, forms)


def _named(name: str) -> list[tuple[str, Callable[..., Any]]]:
    found = [(where, getattr(place, key)) for where, place in (("torch", torch), ("Tensor", Tensor), ("F", F))
             for key in dir(place) if key != "_torch" and not key.startswith("_VF") and callable(getattr(place, key, None))
             and function_name(getattr(place, key)) == name]  # fmt: skip
    return list({id(function): (where, function) for where, function in found}.values())


def _operands(name: str) -> list[tuple[tuple[Any, ...], Given]]:
    if name in NUMBERS:
        return NUMBERS[name]
    other = (WHOLE * 4).long() if name.startswith(KINDS) else WHOLE
    pair = [
        ((Cuttable(other, None),), {}), ((Cuttable(other[:, :1], None),), {}), ((Cuttable(other[0, 0], None),), {}),
        ((2,), {}), ((), {}),
    ]  # fmt: skip
    return [*pair, ((Cuttable(other, None),), {"alpha": 2}), ((Cuttable(other, None),), {"rounding_mode": "floor"})]


def _along(value: Any, dim: int) -> Any:
    """The same operand, cut as the first is, where it has all of its entries."""
    return Cuttable(value.whole, dim) if isinstance(value, Cuttable) and value.whole.shape == SHAPE else value


def _sound(name: str, where: str, function: Any, forms: list[tuple[Any, Any]]) -> Iterator[Spelling]:

    seen = set()
    for args, kwargs in forms:
        key = repr([mark(value) for value in (args, sorted(kwargs.items()))])
        made = Spelling(name=name, words=f"{where}.{name}{key}", function=function, args=args, kwargs=kwargs)
        if key not in seen and "cut" in key:
            seen.add(key)
            yield made


# -- what is no function with a table: indices, attributes, copies


INDICES: list[Any] = [
    0, -1, slice(1, 3), slice(None, None, 2), None, Ellipsis, (Ellipsis, 0), (0, slice(None), 1), (slice(None), 2),
    (slice(0, 2), slice(None), slice(1, 4)), (slice(None), None, slice(0, 3)), [0, 2], [[0, 1], [1, 0]],
    torch.tensor([3, 0, 0]), torch.tensor(1), torch.tensor([[0, 1], [1, 2]]), torch.tensor([True, False, True, True]),
    (slice(None), torch.tensor([1, 0])), (torch.tensor([0, 1]), torch.tensor([1, 0])), (Ellipsis, torch.tensor([0, 4])),
    (torch.tensor([0, 1]), slice(None), 0), (slice(None), [True, False, True, True, False, False]), WHOLE > 0,
    (None, torch.tensor([0, 1]), None), range(2), (slice(None), slice(None), slice(-3, None)),
]  # fmt: skip


def others() -> Iterator[Spelling]:
    """Indices, attributes, copies, and what writes where the piece would not have it."""
    for dim in range(3):
        x = _cut(dim)
        calls: dict[str, Callable[[Any], Any]] = {
            **{f"[{_show(i)}]": lambda t, i=i: t[i] for i in INDICES},
            **{f".{n}": lambda t, n=n: getattr(t, n) for n in ("T", "mT", "shape", "ndim", "dtype", "data") if n != "T"},
            **{f".{n}()": lambda t, n=n: getattr(t, n)() for n in _METHODS},
            "len": len, "list": list, "iter": iter,
            "new_zeros": lambda t: t.new_zeros(2, 3), "to": lambda t: t.to(torch.float32),
            "to by name": lambda t: t.to(dtype=torch.float32), "to another": lambda t: t.to(torch.ones(1).half()),
            "type name": lambda t: t.type(), "type": lambda t: t.type(torch.float32),
            "like": lambda t: torch.zeros_like(input=t) + torch.full_like(t, 2.0), "slices": lambda t: t[:2] + t[2:],
            "augmented": lambda t: operator.iadd(t, 1), "power": lambda t: operator.ipow(t, 2),
            "out": lambda t: torch.add(t, 1, out=torch.empty(*SHAPE, dtype=torch.float64)) if not t.requires_grad else t,
            "written view": _written_view, "written part": _written_part, "as strided": _strided,
            "unknown": lambda t, dim=dim: torch.fft.fft(t, dim=dim).abs() + t.roll(1, 1), "halves": lambda t: 2 / t + 1 % t,
        }  # fmt: skip
        for words, call in calls.items():
            yield Spelling(name="__getitem__" if words.startswith("[") else words, words=f"{words} cut{dim}", function=call,
                           args=(x,), kwargs={})  # fmt: skip


_METHODS = ("contiguous", "clone", "detach", "float", "half", "bfloat16", "numel", "nelement", "dim", "ndimension",
            "is_floating_point", "is_complex", "element_size", "t_", "size")[:13]  # fmt: skip


def _show(index: Any) -> str:
    return repr(index).replace("\n", "")[:50]


def _written_view(t: Any) -> Any:
    """Through a view that a rule makes: the piece has it. (With the whole put together before, which is then old.)"""
    before = t.flip(0, 1, 2).sum()
    t.transpose(0, 1).mul_(2.0)
    return t.flip(0, 1, 2) * before


def _written_part(t: Any) -> Any:
    """Through a view that no rule makes."""
    t[::2].mul_(3.0)
    return t * 1


def _strided(t: Any) -> Any:
    return t.as_strided((2, 3), (t.stride(0), t.stride(1)))
