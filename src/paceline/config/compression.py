"""Gradient compression as requested by `--compress`: the method and its options."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

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
    """An option of a method: its allowed values in words, and its parser, which raises ValueError for others."""

    said: str
    read: Callable[[str], Any]


def _whole(text: str, *, least: int, most: int) -> int:
    if not least <= int(text) <= most:
        raise ValueError(text)
    return int(text)


def _share(text: str) -> float:
    if not 0.0 < float(text) <= 1.0:
        raise ValueError(text)
    return float(text)


_MOST_BLOCK, _MOST_RANK = 65_536, 1_024
_OPTIONS: dict[Method, dict[str, _Option]] = {
    Method.INT8: {"block": _Option("an integer from 8 to 65,536", lambda t: _whole(t, least=8, most=_MOST_BLOCK))},
    Method.POWERSGD: {"rank": _Option("an integer from 1 to 1,024", lambda t: _whole(t, least=1, most=_MOST_RANK))},
    Method.TOPK: {"ratio": _Option("a number above 0, at most 1", _share)},
}


@dataclass(frozen=True, kw_only=True)
class Compression:
    """The requested compression.

    `block`: numbers that share a scale; `rank`: columns of a factor; `ratio`: the fraction of elements sent.
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
    def has_memory(self) -> bool:
        """Return whether the method has error feedback: what is not sent is added to the next gradient."""
        return self.method in (Method.POWERSGD, Method.TOPK)

    def picked(self, numel: int) -> int:
        """Return how many elements top-k sends of a parameter of `numel` elements."""
        return min(numel, max(1, math.ceil(self.ratio * numel)))

    def factor_rank(self, rows: int, columns: int) -> int:
        """Return the number of columns of the factors of a matrix; 0 if they are no smaller and it is sent whole."""
        rank = min(self.rank, rows, columns)
        return rank if rank * (rows + columns) < rows * columns else 0

    def __str__(self) -> str:
        """Return the text that requests this compression, with every option of the method."""
        options = [f"{name}={getattr(self, name)}" for name in _OPTIONS.get(self.method, {})]
        return ",".join([str(self.method), *options])


def method_with(name: str) -> Method | None:
    """Return the method of this name, or the one that has an option of this name."""
    return next((one for one in Method if name in (one, *_OPTIONS.get(one, {}))), None)


def parse_compress(text: str) -> Compression:
    """Parse `bf16`, `fp16`, `int8,block=256`, `powersgd,rank=4`, `topk,ratio=0.01`, or `none`.

    Raises:
        LayoutError: no such method, or an option that it does not have.
    """
    word, *options = (part.strip().lower() for part in text.split(","))
    if word not in set(Method):
        near = closest_word(word, list(Method))
        raise LayoutError(
            f"{text!r} is not a compression method.",
            cause=did_you_mean(word, list(Method)) or f"the methods: {', '.join(list(Method)[1:])}",
            hint=f"--compress {Compression(method=Method(near or Method.BF16))}",
        )
    method = Method(word)
    return Compression(method=method, **_read(method, options))


def _read(method: Method, options: Sequence[str]) -> dict[str, Any]:
    known = _OPTIONS.get(method, {})
    found: dict[str, Any] = {}
    for option in options:
        name, _, value = (part.strip() for part in option.partition("="))
        if name in found:
            raise LayoutError(f"--compress {method} has {name} twice.", hint=f"--compress {method},{option}")
        if name not in known:
            raise LayoutError(
                f"--compress {method} has no option {name!r}.",
                cause=did_you_mean(name, known) or f"its options: {', '.join(known) or 'none'}",
                hint=f"--compress {Compression(method=method)}",
            )
        try:
            found[name] = known[name].read(value)
        except ValueError:
            raise LayoutError(
                f"--compress {method},{option}: {name} is {known[name].said}.",
                hint=f"--compress {Compression(method=method)}",
            ) from None
    return found
