"""Workspace of a bfloat16 convolution on a CPU with AVX-512 and no AMX tiles, which multiplies pairs of elements.

The formulas are fitted to the allocator's records of single calls. Sums are in float32. For the weight gradient each
thread transposes an input and an output image so that pairs are adjacent, with rows padded to an even number of
elements. With strides, few channels or groups, all threads share one image.
"""

import math
from dataclasses import dataclass

_FLOAT_BYTES = 4
_PAIR_ELEMENTS, _FEW_CHANNELS = 2, 3  # images with so few channels are read in place
_BARRIER_BYTES = 8580  # the barrier of the threads

ImageShape = tuple[int, int, tuple[int, ...]]
"""The channels, the channels padded to blocks, and the spatial size of an image."""


@dataclass(frozen=True, kw_only=True)
class Bf16ConvolutionCall:
    """A convolution call between larger images (`source`) and smaller ones (`result`); either may be the input."""

    source: ImageShape
    result: ImageShape
    kernel: tuple[int, ...]
    stride: int
    padding: int
    groups: int
    biases: int
    item_bytes: int
    threads: int

    def forward_bytes(self) -> int:
        """Return the bytes of all threads' sums of an image, for a kernel of one element; else 0."""
        if max(self.kernel) > 1:
            return 0
        (_, in_channels, _), (_, out_channels, output_size) = self.source, self.result
        strided_bytes = in_channels * self.item_bytes if self.stride > 1 else 0
        return self.threads * math.prod(output_size) * (out_channels * _FLOAT_BYTES + strided_bytes)

    def weight_gradient_bytes(self) -> int:
        """Return the bytes of the transposed images, and of the gradient in float32."""
        if max(self.kernel) == 1:
            return 0
        (channels, in_channels, input_size), (_, out_channels, output_size) = self.source, self.result
        is_few = channels <= _FEW_CHANNELS
        gradient_bytes = (
            (channels if is_few else in_channels) * out_channels // self.groups * math.prod(self.kernel) * _FLOAT_BYTES
        )
        row_steps = -(-(input_size[-1] + 2 * max(self.padding, 1)) // self.stride)
        source = (
            0
            if is_few
            else in_channels * math.prod(input_size[:-1]) * self.stride * _round_up_to_pair(row_steps) * self.item_bytes
        )
        result = out_channels * math.prod(output_size[:-1]) * _round_up_to_pair(output_size[-1]) * self.item_bytes
        sums = (_FLOAT_BYTES + self.item_bytes) * self.biases
        is_per_thread = self.stride == 1 and self.groups == 1 and not is_few
        return (self.threads if is_per_thread else 1) * (source + result + gradient_bytes) + _BARRIER_BYTES + sums


def _round_up_to_pair(number: int) -> int:
    return number + number % _PAIR_ELEMENTS
