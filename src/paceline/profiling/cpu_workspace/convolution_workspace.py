"""Workspace of a convolution on a CPU, depending on the algorithm that torch and oneDNN choose.

The formulas are fitted to the allocator's records of single calls. The calls ran on CPUs with AVX2, and on CPUs with
AVX-512 and bfloat16 products, both with and without AMX tiles. There are four algorithms:

- *blocked* copies operands and results into blocks of 16 channels (8 without AVX-512), padded at the end. It is for
  float32, and for bfloat16 with AVX-512 and no tiles, which needs additional sums in float32 (`Bf16ConvolutionCall`).
- *channels last copy* copies operands to channels last, and copies results back. It is for bfloat16 with tiles, and for
  strided convolutions from smaller images to larger ones.
- *channels last* copies only weights. It is for operands that have this memory format already.
- *im2col* is torch's own. It is for small single images, for kernels of one element in one thread, and for all bfloat16
  convolutions without AVX-512 (`Im2colCall`).
"""

import math
from dataclasses import dataclass

from paceline.profiling.cpu_workspace.bf16_convolution_workspace import Bf16ConvolutionCall
from paceline.profiling.cpu_workspace.im2col_workspace import Im2colCall

_BLOCK_CHANNELS, _HALF_BLOCK_CHANNELS = 16, 8  # of a block with AVX-512, and half of it
# For the weight gradient, input images with at most so many channels are not copied into blocks. Grouped and transposed
# convolutions are exceptions.
_FEW_CHANNELS = 3
_SMALL_KERNEL = 3
_SMALL_ELEMENTS = 20480  # torch uses its own im2col for a small kernel on a single image of at most so many elements
_ROW_ELEMENTS = 32  # bfloat16 rows are padded to a multiple of this when they are transposed
_FLOAT_BYTES = 4
_MAX_TRANSPOSED_BYTES = 600_000  # of input and output image together; larger images are transposed in parts
_ADDRESS_BYTES = 30_000  # of the list of operand addresses that the matmul kernel gets
_FLOAT_SUM_BYTES = 70_000  # of a thread's rows of sums in float32
_MAX_ONEDNN_KERNEL = 14  # the weight gradients of wider kernels use im2col, one image at a time


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution call with `threads` threads. `channels_last` says whether its input has this memory format."""

    batch_size: int
    in_channels: int
    out_channels: int
    input_size: tuple[int, ...]
    """The spatial size of the input images."""
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    has_bias: bool
    item_bytes: int
    channels_last: bool
    threads: int
    block_channels: int = _BLOCK_CHANNELS
    """The number of channels in a block: as many as a register has float32 elements."""
    has_tiles: bool = True
    """True if bfloat16 products are computed in tiles (AMX)."""

    def forward_bytes(self) -> int:
        """Return the peak bytes of the forward, including its result."""
        if self._uses_16bit_im2col:
            return self._im2col_call.forward_bytes()
        result = self._image_bytes(self.out_channels, self.output_size)
        if self.uses_im2col:
            return result + self._im2col_bytes()
        if self.channels_last:
            return result + 2 * self._weight_bytes(self.in_channels, self.out_channels)
        if self._copies_channels_last(grows=self.transposed):
            operands = self._image_bytes(self.in_channels, self.input_size) + self._weight_bytes(
                self.in_channels, self.out_channels
            )
            return max(operands + result + self._float_sum_bytes(), 3 * result)
        padded_result = self._image_bytes(self._padded_channels(self.out_channels), self.output_size)
        sums = self._bf16_call.forward_bytes() if self._multiplies_pairs else 0
        if self._reads_input_in_place:
            return max(
                self._weight_bytes(self.in_channels, self._padded_channels(self.out_channels)) + padded_result,
                padded_result + result,
            )
        padded_input = self._image_bytes(self._padded_channels(self.in_channels), self.input_size)
        extra = padded_result if self.transposed and self.has_bias else 0
        extra *= _FLOAT_BYTES // self.item_bytes if self._multiplies_pairs else 1
        return max(extra + sums + padded_input + self._padded_weight_bytes() + padded_result, padded_result + result)

    def backward_bytes(self, *, source: bool, weight: bool, bias: bool) -> int:
        """Return the peak bytes of a backward that computes the gradients of input (`source`), weight or bias."""
        if self._uses_16bit_im2col:
            return self._im2col_call.backward_bytes(source=source, weight=weight, bias=bias)
        results = self._image_bytes(self.in_channels, self.input_size) if source else 0
        if self.uses_im2col:
            return results + self._weight_bytes(self.in_channels, self.out_channels) * weight + self._im2col_bytes()
        if self.channels_last:
            return results + 3 * self._weight_bytes(self.in_channels, self.out_channels)
        input_gradient = self._input_gradient_bytes() if source else 0
        return max(input_gradient, results + self._weight_gradient_bytes() if weight else 0)

    @property
    def output_size(self) -> tuple[int, ...]:
        """The spatial size of the results."""
        lengths = []
        for dim, side in enumerate(self.input_size):
            window = self.dilation[dim] * (self.kernel[dim] - 1) + 1
            step, pad = self.stride[dim], self.padding[dim]
            lengths.append(
                (side - 1) * step - 2 * pad + window if self.transposed else (side + 2 * pad - window) // step + 1
            )
        return tuple(lengths)

    @property
    def uses_im2col(self) -> bool:
        """Return whether torch computes this convolution in float32 without oneDNN, by im2col."""
        if self.item_bytes != _FLOAT_BYTES:
            return False
        is_plain = not (self.is_strided or any(size != 1 for size in self.dilation))
        is_pointwise = (
            is_plain and self.batch_size < _BLOCK_CHANNELS and set(self.kernel[-2:]) == {1} and self.threads == 1
        )
        elements = self.batch_size * self.in_channels * math.prod(self.input_size)
        is_small = self.batch_size == 1 and elements <= _SMALL_ELEMENTS and min(self.kernel[-2:]) <= _SMALL_KERNEL
        return is_pointwise or (self.groups == 1 and is_small)

    @property
    def _uses_16bit_im2col(self) -> bool:
        return self.item_bytes < _FLOAT_BYTES and self.block_channels < _BLOCK_CHANNELS

    @property
    def _im2col_call(self) -> Im2colCall:
        is_dilated = any(size != 1 for size in self.dilation)
        return Im2colCall(
            batch_size=self.batch_size, in_channels=self.in_channels, out_channels=self.out_channels,
            input_size=self.input_size, output_size=self.output_size,
            kernel=self.kernel, is_plain=not self.is_strided and not any(self.padding), is_dilated=is_dilated,
            groups=self.groups, transposed=self.transposed, item_bytes=self.item_bytes,
        )  # fmt: skip

    @property
    def _multiplies_pairs(self) -> bool:
        is_depthwise = self.groups > 1 and self.groups == self.in_channels  # a sum over channels has one element
        return self.item_bytes < _FLOAT_BYTES and not self.has_tiles and not is_depthwise

    @property
    def _bf16_call(self) -> Bf16ConvolutionCall:
        source_side = (self.in_channels, self._padded_channels(self.in_channels), self.input_size)
        result_side = (self.out_channels, self._padded_channels(self.out_channels), self.output_size)
        source, result = (result_side, source_side) if self.transposed else (source_side, result_side)
        return Bf16ConvolutionCall(
            source=source, result=result, kernel=self.kernel, stride=self.stride[-1], padding=self.padding[-1],
            groups=self.groups, biases=self.out_channels, item_bytes=self.item_bytes, threads=self.threads,
        )  # fmt: skip

    @property
    def is_strided(self) -> bool:
        """Return whether at least one stride is not 1."""
        return any(size != 1 for size in self.stride)

    @property
    def _reads_input_in_place(self) -> bool:
        return self.in_channels < _BLOCK_CHANNELS and self.groups == 1 and not self.transposed

    def _copies_channels_last(self, *, grows: bool) -> bool:
        """Return whether the algorithm is *channels last copy*. `grows`: results are larger images than operands."""
        if self.item_bytes != _FLOAT_BYTES and self.has_tiles:
            return self.groups != self.in_channels or self.groups == 1
        return grows and self.is_strided and (self.groups == 1 or self.block_channels < _BLOCK_CHANNELS)

    def _input_gradient_bytes(self) -> int:
        result = self._image_bytes(self.in_channels, self.input_size)
        if self._copies_channels_last(grows=not self.transposed):
            operands = self._image_bytes(self.out_channels, self.output_size) + self._weight_bytes(
                self._padded_channels(self.in_channels), self.out_channels
            )
            return max(operands + result, 3 * result)
        padded_result = self._image_bytes(self._padded_channels(self.in_channels), self.input_size)
        gradient = self._image_bytes(self._padded_channels(self.out_channels), self.output_size)
        return max(gradient + self._padded_weight_bytes() + padded_result, padded_result + result)

    def _weight_gradient_bytes(self) -> int:
        if self._copies_channels_last(grows=False):
            image_bytes = self._image_bytes(self.in_channels, self.input_size) + self._image_bytes(
                self.out_channels, self.output_size
            )
            return image_bytes + self._paired_weight_bytes() + self._transposed_bytes()
        weight_bytes = self._weight_bytes(self.in_channels, self.out_channels)
        if self.kernel[-1] > _MAX_ONEDNN_KERNEL:
            return 5 * weight_bytes + self._im2col_bytes() // self.batch_size
        if self.block_channels < _BLOCK_CHANNELS and (
            len(self.input_size) > 2 or any(size != 1 for size in self.dilation)
        ):
            return (
                5 * weight_bytes
                + self.in_channels * math.prod((*self.kernel, *self.output_size[-2:])) * self.item_bytes
            )
        padded_input = 0
        if self.in_channels > _FEW_CHANNELS or self.groups > 1 or self.transposed:
            padded_channels = (
                _HALF_BLOCK_CHANNELS
                if self.in_channels <= _HALF_BLOCK_CHANNELS and self.groups == 1
                else self._padded_channels(self.in_channels)
            )
            padded_input = self._image_bytes(padded_channels, self.input_size)
        gradient = self._image_bytes(self._padded_channels(self.out_channels), self.output_size)
        padded_weights = self._padded_weight_bytes() if self.in_channels > _FEW_CHANNELS else weight_bytes
        sums = self._bf16_call.weight_gradient_bytes() if self._multiplies_pairs else 0
        return max(gradient + padded_input + padded_weights + sums, padded_weights + weight_bytes)

    def _transposed_bytes(self) -> int:
        """Return the bytes that a weight gradient needs for transposed bfloat16 images and for sums in float32."""
        in_channels, input_size, out_channels, output_size = (
            self.in_channels,
            self.input_size,
            self.out_channels,
            self.output_size,
        )
        if self.transposed:
            in_channels, input_size, out_channels, output_size = out_channels, output_size, in_channels, input_size
        step, pad = self.stride[-1], self.padding[-1]
        row = step * _round_up(-(-(input_size[-1] + 2 * pad) // step), _ROW_ELEMENTS)
        source = _round_up(in_channels, _BLOCK_CHANNELS) * math.prod(input_size[:-1]) * row * self.item_bytes
        result = _round_up(out_channels, _BLOCK_CHANNELS) * math.prod(output_size) * self.item_bytes
        parts = 1 if self.is_strided else -(-(source + result) // _MAX_TRANSPOSED_BYTES)
        sums = (
            _round_up(in_channels, _BLOCK_CHANNELS)
            * _round_up(out_channels, _BLOCK_CHANNELS)
            // self.groups
            * math.prod(self.kernel)
            * _FLOAT_BYTES
        )
        return self.threads * ((source + result) // parts + sums) + _ADDRESS_BYTES

    def _float_sum_bytes(self) -> int:
        """Return the bytes of a bfloat16 call's float32 sums and, with strides, of a rearranged image."""
        if max(self.kernel) == 1 or self.item_bytes == _FLOAT_BYTES:
            return 0
        image = (
            _round_up(self.in_channels, _ROW_ELEMENTS) * math.prod(self.input_size) * self.item_bytes
            if self.is_strided
            else 0
        )
        return self.threads * (_FLOAT_SUM_BYTES + image)

    def _paired_weight_bytes(self) -> int:
        """Return the bytes of the bfloat16 weights, padded to blocks in which pairs of elements are adjacent."""
        in_channels, out_channels = (
            (self.out_channels, self.in_channels) if self.transposed else (self.in_channels, self.out_channels)
        )
        if self.groups > 1:
            return self._weight_bytes(in_channels, out_channels)
        return self._weight_bytes(_round_up(in_channels, _ROW_ELEMENTS), _round_up(out_channels, _BLOCK_CHANNELS))

    def _im2col_bytes(self) -> int:
        if self.transposed:
            return (
                self.batch_size
                * self.out_channels
                * math.prod(self.kernel)
                * math.prod(self.input_size)
                * self.item_bytes
            )
        if set(self.kernel) == {1}:
            return 0
        return self.in_channels * math.prod(self.kernel) * self._image_bytes(1, self.output_size)

    def _image_bytes(self, channels: int, size: tuple[int, ...]) -> int:
        return self.batch_size * channels * math.prod(size) * self.item_bytes

    def _weight_bytes(self, in_channels: int, out_channels: int) -> int:
        return in_channels * out_channels // self.groups * math.prod(self.kernel) * self.item_bytes

    def _padded_weight_bytes(self) -> int:
        return self._weight_bytes(self._padded_channels(self.in_channels), self._padded_channels(self.out_channels))

    def _padded_channels(self, channels: int) -> int:
        return channels if self.groups > 1 else _round_up(channels, self.block_channels)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
