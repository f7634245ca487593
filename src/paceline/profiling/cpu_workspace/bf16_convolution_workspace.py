"""Workspace of a bfloat16 convolution on a CPU with AVX-512 and no AMX tiles. Such a CPU multiplies pairs of elements.

The formulas are fitted to the allocator's records of single calls. Sums are in float32. For the weight gradient, each
thread transposes an input image and an output image so that pairs are adjacent. Rows are padded to an even number of
elements. All threads share the transposed images if the convolution has strides or several groups, or if its larger
images (`Bf16ConvolutionCall.source`) have few channels.
"""

import math
from dataclasses import dataclass

_FLOAT_BYTES = 4
_PAIR_ELEMENTS = 2
_FEW_CHANNELS = 3  # `source` images with at most so many channels are read in place, not transposed
_BARRIER_BYTES = 8580  # of the barrier that synchronizes the threads

ImageShape = tuple[int, int, tuple[int, ...]]
"""The channels, the channels padded to blocks, and the spatial size of an image."""


@dataclass(frozen=True, kw_only=True)
class Bf16ConvolutionCall:
    """A convolution call between larger images (`source`) and smaller ones (`result`).

    In a transposed convolution the smaller images are the input. `biases` is the number of bias elements.
    """

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
        """Return the bytes of the sums of one image per thread; 0 unless the kernel has one element."""
        if max(self.kernel) > 1:
            return 0
        (_, in_channels, _), (_, out_channels, output_size) = self.source, self.result
        strided_bytes = in_channels * self.item_bytes if self.stride > 1 else 0
        return self.threads * math.prod(output_size) * (out_channels * _FLOAT_BYTES + strided_bytes)

    def weight_gradient_bytes(self) -> int:
        """Return the bytes of the transposed images and of the weight gradient in float32."""
        if max(self.kernel) == 1:
            return 0
        (channels, in_channels, input_size), (_, out_channels, output_size) = self.source, self.result
        has_few_channels = channels <= _FEW_CHANNELS
        gradient_channels = channels if has_few_channels else in_channels
        gradient_bytes = gradient_channels * out_channels // self.groups * math.prod(self.kernel) * _FLOAT_BYTES
        row_steps = -(-(input_size[-1] + 2 * max(self.padding, 1)) // self.stride)
        source = (
            0
            if has_few_channels
            else in_channels * math.prod(input_size[:-1]) * self.stride * _round_up_to_pair(row_steps) * self.item_bytes
        )
        result = out_channels * math.prod(output_size[:-1]) * _round_up_to_pair(output_size[-1]) * self.item_bytes
        sums = (_FLOAT_BYTES + self.item_bytes) * self.biases
        is_per_thread = self.stride == 1 and self.groups == 1 and not has_few_channels
        return (self.threads if is_per_thread else 1) * (source + result + gradient_bytes) + _BARRIER_BYTES + sums


def _round_up_to_pair(number: int) -> int:
    return number + number % _PAIR_ELEMENTS
