"""Find parameters whose gradient is only rounding, so that two recordings cannot be judged by them.

Examples are a convolution's bias before BatchNorm, a key's bias in attention, the magnitude of a normalized weight. The
true gradient is zero. The computed gradient is rounding, which changes with the order of summation; it is as large as
the rounding errors of the gradients around it, and its direction is random. Adam takes full steps along it, so such
weights diverge by the learning rate.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from paceline.verification.fingerprints.fingerprint import Fingerprint, Record, max_rounding

PROPORTIONAL_TOLERANCE = 1e-3
_DIFFERENCE_EPS = 16.0  # machine epsilons by which rounding may change a small true gradient
_HALF_PRECISION_EPS = 2.0**-20  # larger machine epsilons are of half precision: rounding alone exceeds the floor
_MOVEMENT_EPS = 16.0  # machine epsilons by which a weight's movement may differ after half-precision gradients
_GRADIENT_EPS = 12.0  # machine epsilons by which a half-precision gradient may differ; measured: 2 to 10, four layers
_MOVEMENT_MARGIN = 4.0  # the two runs may move in opposite directions, and both movements are estimates
# The least norm of a tensor, divided by its largest element. With a smaller ratio, about four elements carry the norm,
# and two such tensors may be proportional by chance.
_MIN_SPREAD = 2.0
# rounding affects all gradients: of 2,900 differences in bfloat16, none was more than 4.4 times all others together
_OUTLIER_RATIO = 8.0
_ZERO_EPS = 1.0  # a gradient below this many machine epsilons of the gradients around it may be rounded to zero

Pair = tuple[Record, Record]
Fingerprints = Mapping[str, Fingerprint]


class IllConditionedCheck:
    """A check of whether rounding alone explains a difference. Its methods must be called in the order of the steps."""

    def __init__(self, pairs: Iterable[Pair], *, floor: float) -> None:
        self._floor = floor
        self._gradients: dict[int, tuple[dict[str, Fingerprint], ...]] = {}
        self._weights: dict[int, tuple[dict[str, Fingerprint], ...]] = {}
        for pair in pairs:  # each optimizer has its own record of a step
            for by_step, kind in ((self._gradients, "gradients"), (self._weights, "weights")):
                for merged, record in zip(by_step.setdefault(pair[0].step, ({}, {})), pair, strict=True):
                    merged.update(getattr(record, kind))
        self._steps = sorted(self._weights)
        # how far each weight may have diverged so far: because its gradient is only rounding, because of faint elements
        # (see `add_step`), and because of half-precision gradients
        self._rounding_movement: dict[str, float] = {}
        self._faint_movement: dict[str, float] = {}
        self._coarse_movement: dict[str, float] = {}
        self._computed_steps: set[int] = set()
        self._last_movements: tuple[int, dict[str, float]] = (-1, {})

    @property
    def unjudged(self) -> list[str]:
        """The parameters whose gradients have differed only by rounding. A difference in them proves nothing."""
        return sorted(self._rounding_movement)

    def is_gradient_rounding(self, name: str, step: int) -> bool:
        """Return True if rounding explains the difference of a parameter's gradients in this step.

        In half precision, a difference of a few machine epsilons of the gradients themselves is rounding. Otherwise the
        gradients, or their difference, must be as small as the rounding errors of the gradients around them, and
        neither gradient may be a multiple of the other by a factor that rounding does not explain. In half precision,
        the difference must also not be an outlier.
        """
        first, second = (fingerprints[name] for fingerprints in self._gradients[step])
        eps = max(first.eps, second.eps)
        surrounding = min(_surrounding_rms(name, fingerprints) for fingerprints in self._gradients[step])
        distance = _rms_distance(first, second)
        if not math.isfinite(distance + surrounding):
            return False
        if eps > _HALF_PRECISION_EPS and distance <= _GRADIENT_EPS * eps * max(_rms(first), _rms(second)):
            return True
        is_noise = (
            max(_rms(first), _rms(second)) <= max_rounding(eps) * surrounding
            or distance <= _DIFFERENCE_EPS * eps * surrounding
        )
        if not is_noise or _is_scaled(first, second, surrounding=surrounding):
            return False
        if eps > _HALF_PRECISION_EPS and self._is_outlier(name, step, eps):
            return False
        other_movements = [
            move for n, move in self._weight_movements(step).items() if n != name and n not in self._rounding_movement
        ]
        self._rounding_movement[name] = self._rounding_movement.get(name, 0.0) + _MOVEMENT_MARGIN * max(
            other_movements, default=0.0
        )
        return True

    def _is_outlier(self, name: str, step: int, eps: float) -> bool:
        """Return True if this gradient differs far more than all others together.

        In half precision, 16 machine epsilons are a large share of the surrounding gradients: in bfloat16, an eighth.
        Many true gradients are smaller. But rounding affects the other gradients too. So a difference is a fault if it
        is much larger than the differences of the others, and larger than one epsilon of the norm of the whole
        gradient.
        """
        distances, sizes = {}, []
        for key in self._gradients[step][0].keys() & self._gradients[step][1].keys():
            first, second = (fingerprints[key] for fingerprints in self._gradients[step])
            distances[key] = _rms_distance(first, second) * math.sqrt(max(first.numel, 1))
            sizes.append(max(first.norm, second.norm))
        distance = distances.pop(name)
        return distance > _OUTLIER_RATIO * math.hypot(*distances.values()) and distance > eps * math.hypot(*sizes)

    def is_weight_rounding(self, name: str, step: int) -> bool:
        """Return True if rounding of the gradients so far, or of the weight, explains the difference of the weight."""
        first, second = (fingerprints[name] for fingerprints in self._weights[step])
        movement = (
            self._rounding_movement.get(name, 0.0)
            + self._faint_movement.get(name, 0.0)
            + self._coarse_movement.get(name, 0.0)
        )
        eps = max(first.eps, second.eps)
        half_rounding = eps * math.sqrt(max(step, 1)) if eps > _HALF_PRECISION_EPS else 0.0
        allowed = movement + (self._floor + half_rounding) * max(_rms(first), _rms(second))
        distance = _rms_distance(first, second)
        return (movement > 0.0 or half_rounding > 0.0) and math.isfinite(distance + allowed) and distance <= allowed

    def add_step(self, step: int) -> None:
        """Add up how far weights may diverge in this step because of rounding in their gradients.

        Some elements of a tensor may have no true gradient, such as the middle of a fused query, key and value bias.
        Adam moves these faint elements by full steps. In half precision, every element has a large rounding error.
        """
        if step in self._computed_steps:
            return
        self._computed_steps.add(step)
        movements = self._weight_movements(step)
        for name in self._gradients[step][0].keys() & self._gradients[step][1].keys():
            first, second = (fingerprints[name] for fingerprints in self._gradients[step])
            largest_other = max((move for n, move in movements.items() if n != name), default=0.0)
            faint_share, eps = max(first.faint_share, second.faint_share), max(first.eps, second.eps)
            if faint_share:
                self._faint_movement[name] = (
                    self._faint_movement.get(name, 0.0) + _MOVEMENT_MARGIN * math.sqrt(faint_share) * largest_other
                )
            if eps > _HALF_PRECISION_EPS:
                share = min(1.0, _MOVEMENT_EPS * eps)
                self._coarse_movement[name] = self._coarse_movement.get(name, 0.0) + share * max(
                    movements.get(name, 0.0), largest_other
                )

    def _weight_movements(self, step: int) -> dict[str, float]:
        """Return how far each weight moved since the previous step, in the run where it moved further."""
        if self._last_movements[0] != step:
            index = self._steps.index(step)
            runs = zip(self._weights[self._steps[index - 1]], self._weights[step], strict=True) if index else ()
            movements: dict[str, float] = {}
            for before, after in runs:
                for name in before.keys() & after.keys():
                    movements[name] = max(movements.get(name, 0.0), _rms_distance(before[name], after[name]))
            self._last_movements = (step, movements)
        return self._last_movements[1]


def factor_between(first: Fingerprint, second: Fingerprint) -> float | None:
    """Return the factor `first / second` of two proportional tensors, 0 if one is zero, None if not proportional."""
    a, b = np.asarray(first.projections), np.asarray(second.projections)
    if _is_zero(first) or _is_zero(second):
        return 0.0
    if not np.any(b):
        return None
    factor = float(a @ b / (b @ b))
    residual = float(np.linalg.norm(a - factor * b))
    return (
        factor if residual <= _proportional_tolerance(first, second) * max(float(np.linalg.norm(a)), 1e-300) else None
    )


def has_factor(first: Fingerprint, second: Fingerprint) -> bool:
    """Return True if two tensors are proportional and their factor explains most of the difference."""
    factor = factor_between(first, second)
    if factor is None:
        return False
    a, b = np.asarray(first.projections), np.asarray(second.projections)
    return abs(factor - 1.0) * float(np.linalg.norm(b)) > 2.0 * float(np.linalg.norm(a - factor * b))


def _is_zero(fingerprint: Fingerprint) -> bool:
    return fingerprint.norm == 0.0


def _proportional_tolerance(first: Fingerprint, second: Fingerprint) -> float:
    """Return how far one tensor may be from a multiple of the other, which includes rounding in half precision."""
    return max(PROPORTIONAL_TOLERANCE, _GRADIENT_EPS * max(first.eps, second.eps))


def _is_scaled(first: Fingerprint, second: Fingerprint, *, surrounding: float) -> bool:
    """Return True if one gradient is a multiple of the other, by a factor that rounding does not explain.

    A factor of 1 is explained. A factor of 0 is explained if the other gradient is so small that it may become zero.
    """
    factor = factor_between(first, second)
    spread_norm = min(p.norm - _MIN_SPREAD * p.largest for p in (first, second))
    if factor is None or spread_norm < 0.0:
        return False
    if factor == 0.0:
        return max(_rms(first), _rms(second)) > _ZERO_EPS * max(first.eps, second.eps) * surrounding
    return abs(factor - 1.0) > _proportional_tolerance(first, second)


def _surrounding_rms(name: str, fingerprints: Fingerprints) -> float:
    """Return the largest RMS of the other gradients in the parent of the parameter's module.

    If the parent has no other parameters, its nearest ancestor that has some is used.
    """
    prefix = name.rpartition(".")[0].rpartition(".")[0]
    while True:
        other_rms = [
            _rms(p) for n, p in fingerprints.items() if n != name and (not prefix or n.startswith(f"{prefix}."))
        ]
        if other_rms or not prefix:
            return max(other_rms, default=0.0)
        prefix = prefix.rpartition(".")[0]


def _rms(fingerprint: Fingerprint) -> float:
    return fingerprint.norm / math.sqrt(max(fingerprint.numel, 1))


def _rms_distance(first: Fingerprint, second: Fingerprint) -> float:
    """Return an estimate of the root mean square of the difference."""
    return first.distance(second) * max(_rms(first), _rms(second))
