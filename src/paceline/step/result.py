"""What one step gave, read lazily: a step never waits for the device unless somebody looks."""

import math
from dataclasses import dataclass
from functools import cached_property

from paceline.step.joint import Agreed, Joint
from paceline.step.later import Later


@dataclass(kw_only=True)
class StepResult:
    """One optimizer step. `loss`, `terms` and `grad_norm` are global: the same on every rank."""

    step: int
    samples: int
    joint: Joint
    norm: Later | None
    compute_seconds: float
    communication_seconds: float
    skipped: bool = False
    lr: float | None = None

    @cached_property
    def agreed(self) -> Agreed:
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
