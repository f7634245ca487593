"""What is known of one wrong gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_LEFT_OVER = 1e-3
_MOST_LEFT = 0.25


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """One parameter: the gradient times C that was found, and each microbatch's contribution `[num_micro, numel]`.

    `everywhere` is what each rank has; `also` are directions that a mistake may have added, by what that would mean.
    """

    name: str
    found: Vector
    contributions: Vector
    floor: float
    everywhere: Sequence[Vector] = ()
    also: Mapping[str, Vector] = field(default_factory=dict)

    @property
    def right(self) -> Vector:
        """What it should be."""
        total: Vector = self.contributions.sum(axis=0)
        return total

    @property
    def allowed(self) -> float:
        """What an explanation may leave over."""
        error = float(np.linalg.norm(self.found - self.right))
        return max(_LEFT_OVER * error, min(self.floor, _MOST_LEFT * error))

    @property
    def ranks_agree(self) -> bool:
        """Whether every rank has the same."""
        return all(float(np.linalg.norm(other - self.found)) <= self.floor for other in self.everywhere)
