"""Workspace of a convolution that torch computes by im2col: 16-bit numbers, on a CPU without AVX-512.

The formulas are fitted to the allocator's records of single calls. All images are unfolded at once, so that each window
is a column; with a dilated kernel, and in the backward of a transposed convolution, one after another. Groups are
computed one after another, and their results are concatenated. A bias gradient is summed from a copy in float32.
"""

import math
from dataclasses import dataclass

_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Im2colCall:
    """A convolution call that uses im2col."""

    images: int
    given: int
    found: int
    sides: tuple[int, ...]
    sides_found: tuple[int, ...]
    kernel: tuple[int, ...]
    is_plain: bool
    """True for a stride of one and no padding: a kernel of one element reads the images in place."""
    is_dilated: bool
    groups: int
    transposed: bool
    item_bytes: int

    def forward_bytes(self) -> int:
        """Return the peak bytes of the forward, including its result."""
        result = self._pictures(self.found, self.sides_found)
        alone = result + self._slice(self.given, self.sides) + self._columns(1 if self.is_dilated else self.images)
        return max(alone, 2 * result) if self.groups > 1 else alone

    def backward_bytes(self, *, source: bool, weight: bool, bias: bool) -> int:
        """Return the peak bytes of the backward, for the requested gradients."""
        of_source = self._pictures(self.given, self.sides) if source else 0
        of_weight = self.given * self.found // self.groups * math.prod(self.kernel) * self.item_bytes if weight else 0
        of_bias = self.found * self.item_bytes if bias else 0
        all_at_once = not self.is_dilated and not self.transposed
        slices = self._slice(self.given, self.sides) + self._slice(self.found, self.sides_found)
        every = of_source + of_weight + of_bias
        working = every + slices + self._columns(self.images if all_at_once else 1)
        if self.groups > 1:
            return max(working, 2 * every)
        summed = 0
        if bias and not self.is_dilated:
            numbers = self.images * self.found * math.prod(self.sides_found) + self.found
            summed = of_source + numbers * _FLOAT_BYTES + of_bias
        return max(working, summed)

    def _columns(self, images: int) -> int:
        if self.is_plain and set(self.kernel) == {1} and not self.transposed:
            return 0
        channels, sides = (self.found, self.sides) if self.transposed else (self.given, self.sides_found)
        return images * channels // self.groups * math.prod(self.kernel) * math.prod(sides) * self.item_bytes

    def _slice(self, channels: int, sides: tuple[int, ...]) -> int:
        """Return the bytes of one group's part of the images."""
        return self._pictures(channels, sides) // self.groups if self.groups > 1 else 0

    def _pictures(self, channels: int, sides: tuple[int, ...]) -> int:
        return self.images * channels * math.prod(sides) * self.item_bytes
