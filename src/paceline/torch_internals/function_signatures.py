"""The signatures of the torch functions that this library overrides, and the binding of call arguments to them.

torch accepts `x.flip(1, 2)`, `x.flip((1, 2))`, `torch.flip(x, dims=[1, 2])` and `x.sum(axis=-1)`. Overrides read their
arguments by name with this module, so that they support all of these forms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# `;` separates the forms of a function, and `|` the names of a parameter.
_SIGNATURE_TABLE = """
addmm(input, mat1, mat2, *, beta=1, alpha=1)
all(input) ; all(input, dim, keepdim=False) ; all(input, *, keepdim=False)
amax(input, dim=(), keepdim=False)
amin(input, dim=(), keepdim=False)
any(input) ; any(input, dim, keepdim=False) ; any(input, *, keepdim=False)
arange(end) ; arange(start, end, step=1)
argmax(input, dim=None, keepdim=False)
baddbmm(input, batch1, batch2, *, beta=1, alpha=1)
bmm(input, mat2)
broadcast_to(input, *size)
cat(tensors, dim=0)
chunk(input, chunks, dim=0)
concat(tensors, dim=0)
concatenate(tensors, dim=0)
cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean',
    label_smoothing=0.0)
cumsum(input, dim, *, dtype=None)
dropout(input, p=0.5, training|train=True, inplace=False)
einsum(equation, *operands)
embedding(input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False, sparse=False)
expand(input, *size, implicit=False)
expand_as(input, other)
flatten(input, start_dim=0, end_dim=-1)
flip(input, *dims)
index_select(input, dim, index)
layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-05, cudnn_enable=True)
linear(input, weight, bias=None)
linalg_vector_norm(input, ord=2, dim=None, keepdim=False, *, dtype=None)
log_softmax(input, dim=None, _stacklevel=3, dtype=None) ; log_softmax(input, dim, dtype=None)
logsumexp(input, dim, keepdim=False)
matmul(input, other)
__matmul__(input, other)
__rmatmul__(other, input)
max(input) ; max(input, other) ; max(input, dim, keepdim=False)
mean(input, *, dtype=None) ; mean(input, dim, keepdim=False, *, dtype=None)
min(input) ; min(input, other) ; min(input, dim, keepdim=False)
mm(input, mat2)
moveaxis(input, source, destination)
movedim(input, source, destination)
narrow(input, dim, start, length)
nll_loss(input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction='mean')
norm(input, p='fro', dim=None, keepdim=False, dtype=None) ; norm(input, p, dim, keepdim, out, dtype=None)
permute(input, *dims)
prod(input, *, dtype=None) ; prod(input, dim, keepdim=False, *, dtype=None)
repeat_interleave(input, repeats, dim=None, *, output_size=None)
reshape(input, *shape)
reshape_as(input, other)
rms_norm(input, normalized_shape, weight=None, eps=None)
scaled_dot_product_attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
    enable_gqa=False)
select(input, dim, index)
size(input, dim=None)
softmax(input, dim=None, _stacklevel=3, dtype=None) ; softmax(input, dim, dtype=None)
sort(input, dim=-1, descending=False) ; sort(input, *, stable, dim=-1, descending=False)
split(input|tensor, split_size|split_size_or_sections|split_sizes, dim=0)
split_with_sizes(input, split_size|split_sizes, dim=0)
squeeze(input) ; squeeze(input, *dim)
stack(tensors, dim=0)
std(input, dim, unbiased=True, keepdim=False) ; std(input, unbiased=True)
std(input, dim=None, *, correction=1, keepdim=False)
stride(input, dim=None)
sum(input, *, dtype=None) ; sum(input, dim, keepdim=False, *, dtype=None)
swapaxes(input, dim0|axis0, dim1|axis1)
swapdims(input, dim0, dim1)
t(input)
tensor_split(input, number|indices_or_sections|tensor_indices_or_sections|indices|sections, dim=0)
topk(input, k, dim=-1, largest=True, sorted=True)
transpose(input, dim0, dim1)
unbind(input, dim=0)
unflatten(input, dim, sizes)
unsqueeze(input, dim)
var(input, dim, unbiased=True, keepdim=False) ; var(input, unbiased=True)
var(input, dim=None, *, correction=1, keepdim=False)
view(input, *size|shape)
view_as(input, other)
"""
_NUMPY_NAMES = {  # NumPy's names of parameters, which torch accepts too
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
    "self": "input",
}
_REQUIRED = object()  # the default of a parameter that has none


def _is_int(value: Any) -> bool:
    return isinstance(value, int | torch.SymInt) and not isinstance(value, bool)


def _are_ints(value: Any) -> bool:
    return _is_int(value) or value is None or (isinstance(value, tuple | list) and all(_is_int(n) for n in value))


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_dtype(value: Any) -> bool:
    return value is None or isinstance(value, torch.dtype)


_TYPE_CHECKS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("input", "other", "mat1", "mat2", "batch1", "batch2"), lambda value: isinstance(value, Tensor)),
    **dict.fromkeys(("dim", "dims", "size", "shape", "sizes", "source", "destination"), _are_ints),
    **dict.fromkeys(("dim0", "dim1", "start_dim", "end_dim", "_stacklevel"), _is_int),
    **dict.fromkeys(("keepdim", "unbiased", "descending", "largest", "training", "inplace"), _is_bool),
    "dtype": _is_dtype,
    "out": lambda value: value is None,
}
"""Type checks by parameter name.

A parameter has a check if its type shows which form of a function is called, or if an override relies on its type.
"""


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter: its names (overrides use the first), its default, and whether it takes all remaining arguments."""

    names: tuple[str, ...]
    default: Any = _REQUIRED
    is_variadic: bool = False
    type_check: Callable[[Any], bool] | None = None

    def accepts(self, value: Any) -> bool:
        """Return whether the parameter accepts this value; it always accepts its default."""
        return self.type_check is None or value is self.default or self.type_check(value)

    def find_keyword(self, kwargs: Mapping[str, Any]) -> str | None:
        """Return the keyword under which the value is given; None if there is none, or more than one."""
        name = self.names[0]
        keys = [key for key in kwargs if key in self.names or _NUMPY_NAMES.get(key) == name]
        return keys[0] if len(keys) == 1 else None


@dataclass(kw_only=True, slots=True)
class Binding:
    """The places of the arguments of a call: each list has names of parameters, with their positions or keywords."""

    defaults: dict[str, Any] = field(default_factory=dict)
    positions: list[tuple[str, int]] = field(default_factory=list)
    keywords: list[tuple[str, str]] = field(default_factory=list)
    remaining_positions: list[tuple[str, int]] = field(default_factory=list)
    """The variadic parameter, if it has the positional arguments from a position on."""
    variadic_keywords: list[tuple[str, str]] = field(default_factory=list)

    def arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of the call by name of parameter."""
        arguments = self.defaults.copy()
        for name, position in self.positions:
            arguments[name] = args[position]
        for name, keyword in self.keywords:
            arguments[name] = kwargs[keyword]
        for name, position in self.remaining_positions:
            arguments[name] = _as_tuple(args[position:])
        for name, keyword in self.variadic_keywords:
            arguments[name] = _as_tuple([kwargs[keyword]])
        return arguments


@dataclass(frozen=True, kw_only=True)
class Signature:
    """A form of a function: its positional and keyword-only parameters."""

    positional: tuple[Parameter, ...]
    keyword_only: tuple[Parameter, ...]

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Binding | None:
        """Return the places of the arguments of a call, or None if the call does not match this form."""
        binding, num_bound, num_keywords = Binding(), 0, 0
        for index, parameter in enumerate((*self.positional, *self.keyword_only)):
            name = parameter.names[0]
            if num_bound < len(args) and index < len(self.positional):
                if parameter.is_variadic:
                    binding.remaining_positions.append((name, num_bound))
                    num_bound = len(args)
                else:
                    binding.positions.append((name, num_bound))
                    num_bound += 1
            elif (keyword := parameter.find_keyword(kwargs)) is not None:
                (binding.variadic_keywords if parameter.is_variadic else binding.keywords).append((name, keyword))
                num_keywords += 1
            elif parameter.default is _REQUIRED:
                return None
            else:
                binding.defaults[name] = parameter.default
        if num_bound < len(args) or num_keywords < len(kwargs):
            return None
        arguments = binding.arguments(args, kwargs)
        accepted = (p.accepts(arguments[p.names[0]]) for p in (*self.positional, *self.keyword_only))
        return binding if all(accepted) else None


def _as_tuple(values: Sequence[Any]) -> Any:
    """Return the arguments as a tuple, both for `f(x, 1, 2)` and for `f(x, (1, 2))`."""
    return tuple(values[0]) if len(values) == 1 and isinstance(values[0], tuple | list) else tuple(values)


def _parse_signature(text: str) -> tuple[str, Signature]:
    name, _, parameters = text.strip().removesuffix(")").partition("(")
    positional: list[Parameter] = []
    keyword_only: list[Parameter] = []
    for part in (part.strip() for part in parameters.replace("()", "None").split(",")):
        section = keyword_only if keyword_only or (positional and positional[-1].names == ("*",)) else positional
        names, _, default = part.partition("=")
        is_variadic = names.startswith("*") and names != "*"
        known_names = tuple(names.lstrip("*").split("|")) if names != "*" else ("*",)
        parameter = Parameter(
            names=known_names,
            default=_DEFAULTS[default] if default else _REQUIRED,
            is_variadic=is_variadic,
            type_check=_TYPE_CHECKS.get(known_names[0]),
        )
        section.append(parameter)
    return name, Signature(
        positional=tuple(p for p in positional if p.names != ("*",)), keyword_only=tuple(keyword_only)
    )


_DEFAULTS = {
    **{str(value): value for value in (None, True, False, -100, -1, 0, 1, 2, 3, 0.0, 0.5, 2.0, 1e-05)},
    "'mean'": "mean",
    "'fro'": "fro",
}


def _parse_table() -> dict[str, tuple[Signature, ...]]:
    signatures: dict[str, list[Signature]] = {}
    for text in _SIGNATURE_TABLE.replace("\n    ", " ").replace(";", "\n").strip().splitlines():
        name, signature = _parse_signature(text)
        signatures.setdefault(name, []).append(signature)
    return {name: tuple(forms) for name, forms in signatures.items()}


SIGNATURES = _parse_table()
"""The signatures by function name; a function may have several forms."""


_bindings: dict[Any, Binding | None] = {}
"""The bindings of earlier calls, by function name, types of the arguments, and keywords."""
_has_sequences: dict[Any, bool] = {}
"""For types of arguments, whether a tuple or a list is among them."""


def bind_arguments(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call of the named function, by the first name of each parameter, with defaults.

    Returns None if the call matches no form in the table, for example because of `out=`. Tensor parallelism calls this
    for each operation of a step on a sharded tensor, so it has to be fast. Which form matches depends only on the types
    of the arguments, and of the elements of tuples and lists, so the bindings are remembered by these types.
    """
    types = (*map(type, args), *map(type, kwargs.values()))
    has_sequence = _has_sequences.get(types)
    if has_sequence is None:
        has_sequence = _has_sequences[types] = any(issubclass(kind, tuple | list) for kind in types)
    key = (name, len(args), types, *kwargs)
    if has_sequence:
        values = (*args, *kwargs.values())
        key = (*key, *(tuple(map(type, value)) for value in values if isinstance(value, tuple | list)))
    if key not in _bindings:
        found = (signature.bind(args, kwargs) for signature in SIGNATURES[name])
        _bindings[key] = next((binding for binding in found if binding is not None), None)
    binding = _bindings[key]
    return None if binding is None else binding.arguments(args, kwargs)
