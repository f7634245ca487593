"""Parse the gradient compression that `--compress` requests: a method and its options."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from typing_extensions import override

from paceline.console.formatting import closest_word, did_you_mean
from paceline.errors import LayoutError


class Method(StrEnum):
    """The compression methods; `NONE` sends gradients as they are."""

    NONE = "none"
    BF16 = "bf16"
    FP16 = "fp16"
    INT8 = "int8"
    POWERSGD = "powersgd"
    TOPK = "topk"


@dataclass(frozen=True)
class _Option:
    """An option of a method: its allowed values in words, and its parser, which raises ValueError for any other."""

    allowed_values: str
    parse: Callable[[str], Any]


def _parse_integer(text: str, *, minimum: int, maximum: int) -> int:
    if not minimum <= int(text) <= maximum:
        raise ValueError(text)
    return int(text)


def _parse_fraction(text: str) -> float:
    if not 0.0 < float(text) <= 1.0:
        raise ValueError(text)
    return float(text)


_MAX_BLOCK, _MAX_RANK = 65_536, 1_024
_OPTIONS: dict[Method, dict[str, _Option]] = {
    Method.INT8: {
        "block": _Option("an integer from 8 to 65,536", lambda t: _parse_integer(t, minimum=8, maximum=_MAX_BLOCK))
    },
    Method.POWERSGD: {
        "rank": _Option("an integer from 1 to 1,024", lambda t: _parse_integer(t, minimum=1, maximum=_MAX_RANK))
    },
    Method.TOPK: {"ratio": _Option("a number above 0, at most 1", _parse_fraction)},
}


@dataclass(frozen=True, kw_only=True)
class Compression:
    """The requested compression.

    `block` is the number of elements that share a scale (int8), `rank` the number of columns of each factor (powersgd),
    and `ratio` the fraction of elements that is sent (topk).
    """

    method: Method = Method.NONE
    block: int = 256
    rank: int = 4
    ratio: float = 0.01

    @property
    def is_on(self) -> bool:
        """Return whether gradients are compressed."""
        return self.method is not Method.NONE

    @property
    def has_error_feedback(self) -> bool:
        """Return whether the method has error feedback: what is not sent is added to the next gradient."""
        return self.method in (Method.POWERSGD, Method.TOPK)

    def num_selected(self, numel: int) -> int:
        """Return how many elements top-k sends of a parameter of `numel` elements."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def factor_rank(self, rows: int, columns: int) -> int:
        """Return the number of columns of a matrix's factors; 0 if the factors would not be smaller than the matrix."""
        rank = min(self.rank, rows, columns)
        return rank if rank * (rows + columns) < rows * columns else 0

    @override
    def __str__(self) -> str:
        """Return the text that requests this compression, with every option of the method."""
        options = [f"{name}={getattr(self, name)}" for name in _OPTIONS.get(self.method, {})]
        return ",".join([str(self.method), *options])


def find_method(name: str) -> Method | None:
    """Return the method of this name, or the method that has an option of this name."""
    return next((method for method in Method if name in (method, *_OPTIONS.get(method, {}))), None)


def parse_compress(text: str) -> Compression:
    """Parse `bf16`, `fp16`, `int8,block=256`, `powersgd,rank=4`, `topk,ratio=0.01`, or `none`.

    Raises:
        LayoutError: the method does not exist, or does not have such an option.
    """
    name, *options = (part.strip().lower() for part in text.split(","))
    if name not in set(Method):
        suggestion = closest_word(name, list(Method))
        raise LayoutError(
            f"{text!r} is not a compression method.",
            cause=did_you_mean(name, list(Method)) or f"the methods: {', '.join(list(Method)[1:])}",
            hint=f"--compress {Compression(method=Method(suggestion or Method.BF16))}",
        )
    method = Method(name)
    return Compression(method=method, **_parse_method_options(method, options))


def _parse_method_options(method: Method, options: Sequence[str]) -> dict[str, Any]:
    options_of_method = _OPTIONS.get(method, {})
    values: dict[str, Any] = {}
    for option in options:
        name, _, value = (part.strip() for part in option.partition("="))
        if name in values:
            raise LayoutError(f"--compress {method} has {name} twice.", hint=f"--compress {method},{option}")
        if name not in options_of_method:
            raise LayoutError(
                f"--compress {method} has no option {name!r}.",
                cause=did_you_mean(name, options_of_method) or f"its options: {', '.join(options_of_method) or 'none'}",
                hint=f"--compress {Compression(method=method)}",
            )
        try:
            values[name] = options_of_method[name].parse(value)
        except ValueError:
            raise LayoutError(
                f"--compress {method},{option}: {name} must be {options_of_method[name].allowed_values}.",
                hint=f"--compress {Compression(method=method)}",
            ) from None
    return values
