"""Workspace of a convolution that torch computes by im2col: 16-bit types, on a CPU without AVX-512.

The formulas are fitted to the allocator's records of single calls. Unfolding an image turns each window into a column.
All images are unfolded at once, with two exceptions: with a dilated kernel, and in the backward of a transposed
convolution, they are unfolded one after another. Groups are computed one after another, and their results are
concatenated. A bias gradient is summed from a float32 copy of the output gradient.
"""

import math
from dataclasses import dataclass

_FLOAT_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Im2colCall:
    """A convolution call that uses im2col."""

    batch_size: int
    in_channels: int
    out_channels: int
    input_size: tuple[int, ...]
    """The spatial size of the input images."""
    output_size: tuple[int, ...]
    """The spatial size of the output images."""
    kernel: tuple[int, ...]
    is_plain: bool
    """Whether strides are 1 and padding is 0. A kernel of one element then reads the images in place."""
    is_dilated: bool
    groups: int
    transposed: bool
    item_bytes: int

    def forward_bytes(self) -> int:
        """Return the peak bytes of the forward, including its result."""
        result = self._image_bytes(self.out_channels, self.output_size)
        working = (
            result
            + self._group_bytes(self.in_channels, self.input_size)
            + self._column_bytes(1 if self.is_dilated else self.batch_size)
        )
        return max(working, 2 * result) if self.groups > 1 else working

    def backward_bytes(self, *, source: bool, weight: bool, bias: bool) -> int:
        """Return the peak bytes of a backward that computes the gradients of input (`source`), weight or bias."""
        input_gradient = self._image_bytes(self.in_channels, self.input_size) if source else 0
        weight_gradient = (
            self.in_channels * self.out_channels // self.groups * math.prod(self.kernel) * self.item_bytes
            if weight
            else 0
        )
        bias_gradient = self.out_channels * self.item_bytes if bias else 0
        unfolds_all_at_once = not self.is_dilated and not self.transposed
        slices = self._group_bytes(self.in_channels, self.input_size) + self._group_bytes(
            self.out_channels, self.output_size
        )
        gradients = input_gradient + weight_gradient + bias_gradient
        working = gradients + slices + self._column_bytes(self.batch_size if unfolds_all_at_once else 1)
        if self.groups > 1:
            return max(working, 2 * gradients)
        bias_sum = 0
        if bias and not self.is_dilated:
            num_elements = self.batch_size * self.out_channels * math.prod(self.output_size) + self.out_channels
            bias_sum = input_gradient + num_elements * _FLOAT_BYTES + bias_gradient
        return max(working, bias_sum)

    def _column_bytes(self, images: int) -> int:
        if self.is_plain and set(self.kernel) == {1} and not self.transposed:
            return 0
        channels, sides = (
            (self.out_channels, self.input_size) if self.transposed else (self.in_channels, self.output_size)
        )
        return images * channels // self.groups * math.prod(self.kernel) * math.prod(sides) * self.item_bytes

    def _group_bytes(self, channels: int, sides: tuple[int, ...]) -> int:
        """Return the bytes of the channels of one group in all images; 0 without groups."""
        return self._image_bytes(channels, sides) // self.groups if self.groups > 1 else 0

    def _image_bytes(self, channels: int, sides: tuple[int, ...]) -> int:
        return self.batch_size * channels * math.prod(sides) * self.item_bytes
