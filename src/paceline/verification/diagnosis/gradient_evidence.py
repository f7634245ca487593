"""The evidence about one wrong gradient: its values on the ranks, and each microbatch's contribution."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_RESIDUAL_SHARE = 1e-3  # an explanation may always leave this share of the error
_MAX_RESIDUAL_SHARE = 0.25  # it may also leave as much as the noise floor, but not more than this share of the error


@dataclass(frozen=True, kw_only=True)
class GradientEvidence:
    """The evidence about one parameter's gradient, before the gradient is divided by the count.

    `observed` is the gradient in one copy of the model, and `by_copy` the gradient in each copy. `floor` is the noise
    floor. `contributions` are those of each microbatch in one process, with the shape `[num_micro, numel]`.
    `added_directions` are vectors that a mistake may have added, by the description of the mistake.
    """

    name: str
    observed: Vector
    contributions: Vector
    floor: float
    by_copy: Sequence[Vector] = ()
    added_directions: Mapping[str, Vector] = field(default_factory=dict)

    @property
    def expected(self) -> Vector:
        """The correct gradient."""
        total: Vector = self.contributions.sum(axis=0)
        return total

    @property
    def max_residual(self) -> float:
        """The largest norm that an explanation may leave unexplained."""
        error = float(np.linalg.norm(self.observed - self.expected))
        return max(_RESIDUAL_SHARE * error, min(self.floor, _MAX_RESIDUAL_SHARE * error))

    @property
    def ranks_agree(self) -> bool:
        """True if every copy of the model has the same gradient, up to noise."""
        return all(float(np.linalg.norm(other - self.observed)) <= self.floor for other in self.by_copy)
