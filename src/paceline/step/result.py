"""The result of one step, read lazily: a step waits for the device only when a value is read."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.step.step_reduction import StepReduction, StepTotals


class AsyncScalars:
    """Scalars that are copied from the device asynchronously; `values` waits only for that copy."""

    def __init__(self, tensor: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if tensor.device.type == "cuda":
            self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._host.copy_(tensor.detach(), non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = tensor.detach()

    def values(self) -> list[float]:
        """Return the scalars as a flat list."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        values: list[float] = self._host.reshape(-1).tolist()
        return values


@dataclass(kw_only=True)
class StepResult:
    """The result of one optimizer step. `loss`, `terms` and `grad_norm` are global: the same on every rank."""

    step: int
    samples: int
    joint: StepReduction
    norm: AsyncScalars | None
    compute_seconds: float
    communication_seconds: float
    skipped: bool = False
    lr: float | None = None

    @cached_property
    def agreed(self) -> StepTotals:
        """The values that the ranks have reduced."""
        return self.joint.agreed()

    @property
    def loss(self) -> float:
        """The sum of each term's quotient over the global batch."""
        return self.agreed.loss

    @property
    def terms(self) -> dict[str, float]:
        """Each term's sum divided by its count."""
        return self.agreed.terms

    @cached_property
    def grad_norm(self) -> float | None:
        """The norm of the global gradient before clipping, or None if it was not measured."""
        return None if self.norm is None else self.norm.values()[0]

    @property
    def finite(self) -> bool:
        """True if the loss and the gradient norm are finite."""
        return math.isfinite(self.loss) and (self.grad_norm is None or math.isfinite(self.grad_norm))

    @property
    def committed(self) -> bool:
        """True if the weights were updated by this step."""
        return not self.skipped
