"""The evidence about one wrong gradient: its values on the ranks, and each microbatch's contribution."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_RESIDUAL_SHARE = 1e-3
_MAX_RESIDUAL_SHARE = 0.25


@dataclass(frozen=True, kw_only=True)
class GradientEvidence:
    """The evidence about one parameter's gradient; all vectors are multiplied by the divisor of the gradient.

    `contributions` has the shape `[num_micro, numel]`; `by_rank` is each rank's gradient; `added_directions` are
    vectors that a mistake may have added, by description.
    """

    name: str
    observed: Vector
    contributions: Vector
    floor: float
    by_rank: Sequence[Vector] = ()
    added_directions: Mapping[str, Vector] = field(default_factory=dict)

    @property
    def expected(self) -> Vector:
        """The correct gradient."""
        total: Vector = self.contributions.sum(axis=0)
        return total

    @property
    def max_residual(self) -> float:
        """The norm of the error that an explanation may leave."""
        error = float(np.linalg.norm(self.observed - self.expected))
        return max(_RESIDUAL_SHARE * error, min(self.floor, _MAX_RESIDUAL_SHARE * error))

    @property
    def ranks_agree(self) -> bool:
        """True if every rank has the same gradient."""
        return all(float(np.linalg.norm(other - self.observed)) <= self.floor for other in self.by_rank)
