"""What one step gave, read lazily: a step never waits for the device unless somebody looks."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from paceline.step.step_reduction import StepReduction, StepTotals


class AsyncScalars:
    """Numbers copied off the device in the background; `values` waits only for that copy."""

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
        """The numbers, as a flat list."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        values: list[float] = self._host.reshape(-1).tolist()
        return values


@dataclass(kw_only=True)
class StepResult:
    """One optimizer step. `loss`, `terms` and `grad_norm` are global: the same on every rank."""

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
        """What the ranks agreed on."""
        return self.joint.agreed()

    @property
    def loss(self) -> float:
        """The sum of the terms' quotients over the global batch."""
        return self.agreed.loss

    @property
    def terms(self) -> dict[str, float]:
        """Each term's quotient."""
        return self.agreed.terms

    @cached_property
    def grad_norm(self) -> float | None:
        """The norm of the global gradient before clipping, or None where nothing asked for it."""
        return None if self.norm is None else self.norm.values()[0]

    @property
    def finite(self) -> bool:
        """Whether loss and gradient were finite."""
        return math.isfinite(self.loss) and (self.grad_norm is None or math.isfinite(self.grad_norm))

    @property
    def committed(self) -> bool:
        """Whether the weights took the step."""
        return not self.skipped
