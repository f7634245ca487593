"""Workspace of a bfloat16 convolution on a CPU with AVX-512 that multiplies pairs, without AMX tiles.

The formulas are fitted to the allocator's records of single calls. Sums are in float32. For the weight gradient each
thread transposes an input and an output image so that pairs are adjacent, with rows padded to an even number of
elements. With strides, few channels or groups, all threads share one image.
"""

import math
from dataclasses import dataclass

_FLOAT_BYTES = 4
_PAIR, _FEW = 2, 3  # channels up to _FEW are read in place
_OWN_BYTES = 8580  # the barrier of the threads

Side = tuple[int, int, tuple[int, ...]]
"""The channels, the channels padded to blocks, and the spatial size of an image."""


@dataclass(frozen=True, kw_only=True)
class Bf16ConvolutionCall:
    """A convolution call, from the larger images (`source`) to the smaller (`result`); either may be the input."""

    source: Side
    result: Side
    kernel: tuple[int, ...]
    step: int
    padding: int
    groups: int
    biases: int
    item_bytes: int
    threads: int

    def forward_bytes(self) -> int:
        """Return the bytes of all threads' sums of an image, for a kernel of one element; else 0."""
        if max(self.kernel) > 1:
            return 0
        (_, given, _), (_, found, sides) = self.source, self.result
        picked = given * self.item_bytes if self.step > 1 else 0
        return self.threads * math.prod(sides) * (found * _FLOAT_BYTES + picked)

    def of_weight_bytes(self) -> int:
        """Return the bytes of the transposed images, and of the gradient in float32."""
        if max(self.kernel) == 1:
            return 0
        (channels, given, sides), (_, found, smaller) = self.source, self.result
        is_few = channels <= _FEW
        wide = (channels if is_few else given) * found // self.groups * math.prod(self.kernel) * _FLOAT_BYTES
        steps = -(-(sides[-1] + 2 * max(self.padding, 1)) // self.step)
        source = 0 if is_few else given * math.prod(sides[:-1]) * self.step * _even(steps) * self.item_bytes
        result = found * math.prod(smaller[:-1]) * _even(smaller[-1]) * self.item_bytes
        sums = (_FLOAT_BYTES + self.item_bytes) * self.biases
        apart = self.step == 1 and self.groups == 1 and not is_few
        return (self.threads if apart else 1) * (source + result + wide) + _OWN_BYTES + sums


def _even(number: int) -> int:
    return number + number % _PAIR
