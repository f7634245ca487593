"""What a convolution of bfloat16 holds beside its blocks, on a CPU with AVX-512 whose products are of pairs, not tiles.

Seen in the allocator's account of single calls. Sums are made in float32. For the gradient of the weights each thread
turns a picture of both sides so that pairs lie beside each other, rows filled up to an even number of steps. Where
pictures become smaller, or channels are few or in groups, threads share one picture out.
"""

import math
from dataclasses import dataclass

_FLOAT_BYTES = 4
_PAIR, _FEW = 2, 3  # elements; channels that are read as they lie
_OWN_BYTES = 8580  # where threads meet

Side = tuple[int, int, tuple[int, ...]]
"""Channels, the same filled up to blocks, and the sides of a picture."""


@dataclass(frozen=True, kw_only=True)
class Bf16ConvolutionCall:
    """One call, from the larger pictures (`source`) to the smaller, whichever of both is given."""

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
        """Sums of a picture in each thread, where the kernel is of one element; else none beside the blocks."""
        if max(self.kernel) > 1:
            return 0
        (_, given, _), (_, found, sides) = self.source, self.result
        picked = given * self.item_bytes if self.step > 1 else 0
        return self.threads * math.prod(sides) * (found * _FLOAT_BYTES + picked)

    def of_weight_bytes(self) -> int:
        """Pictures that are turned, and the gradient in float32."""
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
