"""Workspace of a convolution on a CPU, by the algorithm that oneDNN uses for it.

The formulas are fitted to the allocator's records of single calls, on CPUs with AVX-512 and bfloat16 products, with and
without AMX tiles, and with AVX2. There are four algorithms:

- *blocked*, float32: operands and results are copied into blocks of 16 channels (8 without AVX-512), padded at the end;
  bfloat16 with AVX-512 and without tiles as well, with additional sums in float32 (`Bf16ConvolutionCall`);
- *channels last copy*, bfloat16 with tiles, and strided convolutions from a smaller image to a larger: operands are
  copied to channels last, and results are copied back;
- *channels last*: operands have this layout already, and only weights are copied;
- *im2col*, torch's own: small single images, kernels of one element in one thread, and all bfloat16 without AVX-512
  (`Im2colCall`).
"""

import math
from dataclasses import dataclass

from paceline.profiling.cpu_workspace.bf16_convolution_workspace import Bf16ConvolutionCall
from paceline.profiling.cpu_workspace.im2col_workspace import Im2colCall

_BLOCK, _HALF_BLOCK, _FEW = 16, 8, 3
_SMALL = 20480  # of a single image, below which torch uses its own im2col
_ROW = 32  # bfloat16 rows are padded to a multiple of this when they are transposed
_FLOAT_BYTES = 4
_TURNED_BYTES = 600_000  # of both images; larger ones are transposed in parts
_OWN_BYTES = 30_000  # addresses of the products
_SUMMED_BYTES = 70_000  # rows of sums in float32
_WIDEST = 14  # wider kernels' weight gradients use im2col, one image at a time


@dataclass(frozen=True, kw_only=True)
class Convolution:
    """A convolution call."""

    images: int
    given: int
    found: int
    sides: tuple[int, ...]
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
    block: int = _BLOCK
    """The channels of a block: float32 numbers in a register."""
    has_tiles: bool = True
    """True if bfloat16 products are computed in tiles (AMX)."""

    def forward_bytes(self) -> int:
        """Return the peak bytes of the forward, including its result."""
        if self._is_narrow:
            return self._narrow.forward_bytes()
        found = self._pictures(self.found, self.sides_found)
        if self.is_unfolded:
            return found + self._unfolded_bytes()
        if self.channels_last:
            return found + 2 * self._weights(self.given, self.found)
        if self._in_rows(grows=self.transposed):
            operands = self._pictures(self.given, self.sides) + self._weights(self.given, self.found)
            return max(operands + found + self._summed_bytes(), 3 * found)
        wide = self._pictures(self._block(self.found), self.sides_found)
        sums = self._paired.forward_bytes() if self._is_paired else 0
        if self._is_read_as_it_lies:
            return max(self._weights(self.given, self._block(self.found)) + wide, wide + found)
        read = self._pictures(self._block(self.given), self.sides)
        extra = wide if self.transposed and self.has_bias else 0
        extra *= _FLOAT_BYTES // self.item_bytes if self._is_paired else 1
        return max(extra + sums + read + self._wide_weights() + wide, wide + found)

    def backward_bytes(self, *, source: bool, weight: bool, bias: bool) -> int:
        """Return the peak bytes of the backward, for the requested gradients."""
        if self._is_narrow:
            return self._narrow.backward_bytes(source=source, weight=weight, bias=bias)
        results = self._pictures(self.given, self.sides) if source else 0
        if self.is_unfolded:
            return results + self._weights(self.given, self.found) * weight + self._unfolded_bytes()
        if self.channels_last:
            return results + 3 * self._weights(self.given, self.found)
        of_source = self._of_source_bytes() if source else 0
        return max(of_source, results + self._of_weight_bytes() if weight else 0)

    @property
    def sides_found(self) -> tuple[int, ...]:
        """The spatial size of the results."""
        lengths = []
        for place, side in enumerate(self.sides):
            reach = self.dilation[place] * (self.kernel[place] - 1) + 1
            step, pad = self.stride[place], self.padding[place]
            lengths.append(
                (side - 1) * step - 2 * pad + reach if self.transposed else (side + 2 * pad - reach) // step + 1
            )
        return tuple(lengths)

    @property
    def is_unfolded(self) -> bool:
        """Return whether torch computes it by its own matrix products (im2col)."""
        if self.item_bytes != _FLOAT_BYTES:
            return False
        plain = not (self.is_strided or any(each != 1 for each in self.dilation))
        one = plain and self.images < _BLOCK and set(self.kernel[-2:]) == {1} and self.threads == 1
        elements = self.images * self.given * math.prod(self.sides)
        small = self.images == 1 and elements <= _SMALL and min(self.kernel[-2:]) <= _FEW
        return one or (self.groups == 1 and small)

    @property
    def _is_narrow(self) -> bool:
        return self.item_bytes < _FLOAT_BYTES and self.block < _BLOCK

    @property
    def _narrow(self) -> Im2colCall:
        dilated = any(each != 1 for each in self.dilation)
        return Im2colCall(
            images=self.images, given=self.given, found=self.found, sides=self.sides, sides_found=self.sides_found,
            kernel=self.kernel, is_plain=not self.is_strided and not any(self.padding), is_dilated=dilated,
            groups=self.groups, transposed=self.transposed, item_bytes=self.item_bytes,
        )  # fmt: skip

    @property
    def _is_paired(self) -> bool:
        is_apart = self.groups > 1 and self.groups == self.given  # nothing is summed over channels
        return self.item_bytes < _FLOAT_BYTES and not self.has_tiles and not is_apart

    @property
    def _paired(self) -> Bf16ConvolutionCall:
        small = (self.given, self._block(self.given), self.sides)
        large = (self.found, self._block(self.found), self.sides_found)
        source, result = (large, small) if self.transposed else (small, large)
        return Bf16ConvolutionCall(
            source=source, result=result, kernel=self.kernel, step=self.stride[-1], padding=self.padding[-1],
            groups=self.groups, biases=self.found, item_bytes=self.item_bytes, threads=self.threads,
        )  # fmt: skip

    @property
    def is_strided(self) -> bool:
        """Return whether a stride is not one."""
        return any(each != 1 for each in self.stride)

    @property
    def _is_read_as_it_lies(self) -> bool:
        return self.given < _BLOCK and self.groups == 1 and not self.transposed

    def _in_rows(self, *, grows: bool) -> bool:
        """Return whether the algorithm is *channels last copy*; `grows`: from a smaller image to a larger."""
        if self.item_bytes != _FLOAT_BYTES and self.has_tiles:
            return self.groups != self.given or self.groups == 1
        return grows and self.is_strided and (self.groups == 1 or self.block < _BLOCK)

    def _of_source_bytes(self) -> int:
        result = self._pictures(self.given, self.sides)
        if self._in_rows(grows=not self.transposed):
            operands = self._pictures(self.found, self.sides_found) + self._weights(self._block(self.given), self.found)
            return max(operands + result, 3 * result)
        wide = self._pictures(self._block(self.given), self.sides)
        gradient = self._pictures(self._block(self.found), self.sides_found)
        return max(gradient + self._wide_weights() + wide, wide + result)

    def _of_weight_bytes(self) -> int:
        if self._in_rows(grows=False):
            pictures = self._pictures(self.given, self.sides) + self._pictures(self.found, self.sides_found)
            return pictures + self._weights_in_pairs() + self._turned_bytes()
        own = self._weights(self.given, self.found)
        if self.kernel[-1] > _WIDEST:
            return 5 * own + self._unfolded_bytes() // self.images
        if self.block < _BLOCK and (len(self.sides) > 2 or any(each != 1 for each in self.dilation)):
            return 5 * own + self.given * math.prod((*self.kernel, *self.sides_found[-2:])) * self.item_bytes
        read = 0
        if self.given > _FEW or self.groups > 1 or self.transposed:
            wide = _HALF_BLOCK if self.given <= _HALF_BLOCK and self.groups == 1 else self._block(self.given)
            read = self._pictures(wide, self.sides)
        gradient = self._pictures(self._block(self.found), self.sides_found)
        kept = self._wide_weights() if self.given > _FEW else own
        sums = self._paired.of_weight_bytes() if self._is_paired else 0
        return max(gradient + read + kept + sums, kept + own)

    def _turned_bytes(self) -> int:
        """Return the bytes of the transposed bfloat16 images and of the sums in float32."""
        given, sides, found, smaller = self.given, self.sides, self.found, self.sides_found
        if self.transposed:
            given, sides, found, smaller = found, smaller, given, sides
        step, pad = self.stride[-1], self.padding[-1]
        row = step * _up(-(-(sides[-1] + 2 * pad) // step), _ROW)
        source = _up(given, _BLOCK) * math.prod(sides[:-1]) * row * self.item_bytes
        result = _up(found, _BLOCK) * math.prod(smaller) * self.item_bytes
        parts = 1 if self.is_strided else -(-(source + result) // _TURNED_BYTES)
        sums = _up(given, _BLOCK) * _up(found, _BLOCK) // self.groups * math.prod(self.kernel) * _FLOAT_BYTES
        return self.threads * ((source + result) // parts + sums) + _OWN_BYTES

    def _summed_bytes(self) -> int:
        """Return the bytes of the sums in float32 of a bfloat16 call and, with strides, of a rearranged image."""
        if max(self.kernel) == 1 or self.item_bytes == _FLOAT_BYTES:
            return 0
        image = _up(self.given, _ROW) * math.prod(self.sides) * self.item_bytes if self.is_strided else 0
        return self.threads * (_SUMMED_BYTES + image)

    def _weights_in_pairs(self) -> int:
        """Return the bytes of bfloat16 weights in padded blocks of element pairs."""
        given, found = (self.found, self.given) if self.transposed else (self.given, self.found)
        if self.groups > 1:
            return self._weights(given, found)
        return self._weights(_up(given, _ROW), _up(found, _BLOCK))

    def _unfolded_bytes(self) -> int:
        if self.transposed:
            return self.images * self.found * math.prod(self.kernel) * math.prod(self.sides) * self.item_bytes
        if set(self.kernel) == {1}:
            return 0
        return self.given * math.prod(self.kernel) * self._pictures(1, self.sides_found)

    def _pictures(self, channels: int, sides: tuple[int, ...]) -> int:
        return self.images * channels * math.prod(sides) * self.item_bytes

    def _weights(self, given: int, found: int) -> int:
        return given * found // self.groups * math.prod(self.kernel) * self.item_bytes

    def _wide_weights(self) -> int:
        return self._weights(self._block(self.given), self._block(self.found))

    def _block(self, channels: int) -> int:
        return channels if self.groups > 1 else _up(channels, self.block)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
