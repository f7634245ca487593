"""The evidence about one wrong gradient."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_LEFT_OVER = 1e-3
_MOST_LEFT = 0.25


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The evidence of one parameter: the gradient times C, and each microbatch's contribution `[num_micro, numel]`.

    `everywhere` is each rank's gradient; `also` holds directions that a mistake may have added, by their meaning.
    """

    name: str
    found: Vector
    contributions: Vector
    floor: float
    everywhere: Sequence[Vector] = ()
    also: Mapping[str, Vector] = field(default_factory=dict)

    @property
    def right(self) -> Vector:
        """The correct gradient."""
        total: Vector = self.contributions.sum(axis=0)
        return total

    @property
    def allowed(self) -> float:
        """The norm of the error that an explanation may leave."""
        error = float(np.linalg.norm(self.found - self.right))
        return max(_LEFT_OVER * error, min(self.floor, _MOST_LEFT * error))

    @property
    def ranks_agree(self) -> bool:
        """True if every rank has the same gradient."""
        return all(float(np.linalg.norm(other - self.found)) <= self.floor for other in self.everywhere)
