"""Store tensors in two buffers, so that they change only when a step succeeds."""

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from paceline.torch_internals.private_api import copy_all

_HALF_PRECISION = (torch.bfloat16, torch.float16)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of this dtype are summed and residuals are stored."""
    return torch.float32 if dtype in _HALF_PRECISION else dtype


class DoubleBufferedTensors:
    """Named tensors in two buffers, current and next, that are swapped after a step."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], *, dtype: torch.dtype, device: torch.device) -> None:
        self._shapes = {name: tuple(shape) for name, shape in shapes.items()}
        size = sum(math.prod(shape) for shape in self._shapes.values())
        self._flats = [torch.zeros(size, dtype=dtype, device=device) for _ in range(2)]
        self._views = [self._make_views(flat) for flat in self._flats]
        self._is_committed = False

    @property
    def current(self) -> Mapping[str, Tensor]:
        """Return the current tensors."""
        return self._views[0]

    @property
    def next(self) -> Mapping[str, Tensor]:
        """Return the next tensors, which the running step writes."""
        return self._views[1]

    @property
    def next_flat(self) -> Tensor:
        """Return the next tensors as one flat tensor."""
        return self._flats[1]

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Write the gradients plus the current tensors to `next`."""
        copy_all(list(self.next.values()), gradients)
        self._flats[1].add_(self._flats[0])
        self._is_committed = False

    def commit(self, *, is_finite: Tensor, unused_names: Collection[str]) -> None:
        """Make the tensors in `next` current, except those in `unused_names`.

        If `is_finite`, a scalar on any device, is False, all current tensors stay unchanged.
        """
        torch.where(is_finite, self._flats[1], self._flats[0], out=self._flats[1])
        for name in unused_names:
            if name in self._shapes:
                self.next[name].copy_(self.current[name])
        self._swap()
        self._is_committed = True

    def undo(self) -> None:
        """Restore the tensors from before `commit`, after the step was skipped."""
        if self._is_committed:
            self._swap()
            self._is_committed = False

    def _swap(self) -> None:
        self._flats.reverse()
        self._views.reverse()

    def _make_views(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [math.prod(shape) for shape in self._shapes.values()]
        flat_views = flat.split(sizes)
        return {name: view.view(shape) for (name, shape), view in zip(self._shapes.items(), flat_views, strict=True)}
