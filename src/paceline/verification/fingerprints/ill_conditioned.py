"""Parameters whose gradient is lost in rounding, and by which two recordings cannot be judged.

Examples are a convolution's bias before BatchNorm, a key's bias in attention, the magnitude of a normed weight. The
true gradient is zero, and the computed one is rounding, which changes with the order of summation. It has the size of
float32's last places of the gradients around it, and no direction. Adam makes full steps of it, so such weights
diverge by the learning rate.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from paceline.verification.fingerprints.fingerprint import Fingerprint, Record, faint_size

SHAPE = 1e-3
_DIFFERENCE = 16.0  # units by which rounding may change a small true gradient
_COARSE = 2.0**-20  # with a larger unit, rounding alone exceeds the floor
_SHARE = 16.0  # units of a weight's movement that may differ if its gradient is that coarse
_GRADIENT = 12.0  # units by which such a coarse gradient may differ; nets of four layers had 2 to 10
_STEPS = 4.0  # the two runs may move in opposite directions, and both movements are estimates
_SPREAD = 2.0  # fewer than about four elements may be proportional by chance
_ALONE = 8.0  # rounding affects all gradients: over 2,900 differences in bfloat16, one was at most 4.4 times the rest
_ZERO = 1.0  # units of the gradients around it: a smaller gradient may be rounded to zero

Pair = tuple[Record, Record]
Prints = Mapping[str, Fingerprint]


class IllConditionedCheck:
    """A check of whether rounding alone explains a difference. It must be asked in the order of the steps."""

    def __init__(self, pairs: Iterable[Pair], *, floor: float) -> None:
        self._floor = floor
        self._gradients: dict[int, tuple[dict[str, Fingerprint], ...]] = {}
        self._weights: dict[int, tuple[dict[str, Fingerprint], ...]] = {}
        for pair in pairs:  # each optimizer has its own record of a step
            for kept, parts in ((self._gradients, "gradients"), (self._weights, "weights")):
                for whole, record in zip(kept.setdefault(pair[0].step, ({}, {})), pair, strict=True):
                    whole.update(getattr(record, parts))
        self._steps = sorted(self._weights)
        self._moved: dict[str, float] = {}
        self._faint: dict[str, float] = {}
        self._coarse: dict[str, float] = {}
        self._computed_steps: set[int] = set()
        self._last: tuple[int, dict[str, float]] = (-1, {})

    @property
    def names(self) -> list[str]:
        """The parameters that were in doubt at any step so far."""
        return sorted(self._moved)

    def gradient(self, name: str, step: int) -> bool:
        """Return True if both gradients, or their difference, are as small as rounding and no factor relates them."""
        one, other = (prints[name] for prints in self._gradients[step])
        unit = max(one.unit, other.unit)
        around = min(_around(name, prints) for prints in self._gradients[step])
        apart = _apart(one, other)
        if not math.isfinite(apart + around):
            return False
        if unit > _COARSE and apart <= _GRADIENT * unit * max(_rms(one), _rms(other)):
            return True
        is_noise = max(_rms(one), _rms(other)) <= faint_size(unit) * around or apart <= _DIFFERENCE * unit * around
        if not is_noise or _is_scaled(one, other, around=around):
            return False
        if unit > _COARSE and self._is_alone(name, step, unit):
            return False
        others = [move for n, move in self._moves(step).items() if n != name and n not in self._moved]
        self._moved[name] = self._moved.get(name, 0.0) + _STEPS * max(others, default=0.0)
        return True

    def _is_alone(self, name: str, step: int, unit: float) -> bool:
        """Return True if this gradient differs far more than all others together.

        In half precision, 16 units are an eighth of the gradients around it, which many true gradients are below. But
        the same rounding affects the other gradients too. So a difference that is much larger than theirs is a fault,
        if it is at least a unit of the norm of the whole gradient.
        """
        apart, sizes = {}, []
        for key in self._gradients[step][0].keys() & self._gradients[step][1].keys():
            one, other = (prints[key] for prints in self._gradients[step])
            root = math.sqrt(max(one.numel, 1))
            apart[key] = _apart(one, other) * root
            sizes.append(max(one.norm, other.norm))
        mine = apart.pop(name)
        return mine > _ALONE * math.hypot(*apart.values()) and mine > unit * math.hypot(*sizes)

    def weight(self, name: str, step: int) -> bool:
        """Return True if the optimizer's steps on such gradients may explain the difference of a weight."""
        one, other = (prints[name] for prints in self._weights[step])
        here = self._moved.get(name, 0.0) + self._faint.get(name, 0.0) + self._coarse.get(name, 0.0)
        unit = max(one.unit, other.unit)
        rounded = unit * math.sqrt(max(step, 1)) if unit > _COARSE else 0.0
        allowed = here + (self._floor + rounded) * max(_rms(one), _rms(other))
        apart = _apart(one, other)
        return (here > 0.0 or rounded > 0.0) and math.isfinite(apart + allowed) and apart <= allowed

    def step(self, step: int) -> None:
        """Add up how far weights may diverge in this step because of rounding in their gradients.

        Part of a tensor may have no true gradient, such as the middle of a fused query, key and value bias: its faint
        elements move by whole steps of Adam. In half precision the whole gradient is as coarse as its unit.
        """
        if step in self._computed_steps:
            return
        self._computed_steps.add(step)
        moves = self._moves(step)
        for name in self._gradients[step][0].keys() & self._gradients[step][1].keys():
            one, other = (prints[name] for prints in self._gradients[step])
            others = max((move for n, move in moves.items() if n != name), default=0.0)
            faint, unit = max(one.faint, other.faint), max(one.unit, other.unit)
            if faint:
                self._faint[name] = self._faint.get(name, 0.0) + _STEPS * math.sqrt(faint) * others
            if unit > _COARSE:
                share = min(1.0, _SHARE * unit)
                self._coarse[name] = self._coarse.get(name, 0.0) + share * max(moves.get(name, 0.0), others)

    def _moves(self, step: int) -> dict[str, float]:
        """Return how far each weight moved since the previous step, in the run where it moved further."""
        if self._last[0] != step:
            place = self._steps.index(step)
            runs = zip(self._weights[self._steps[place - 1]], self._weights[step], strict=True) if place else ()
            moves: dict[str, float] = {}
            for before, after in runs:
                for name in before.keys() & after.keys():
                    moves[name] = max(moves.get(name, 0.0), _apart(before[name], after[name]))
            self._last = (step, moves)
        return self._last[1]


def factor_between(one: Fingerprint, other: Fingerprint) -> float | None:
    """Return the factor between two proportional tensors, 0 if one is zero, or None if they are not proportional."""
    a, b = np.asarray(one.projections), np.asarray(other.projections)
    if _is_zero(one) or _is_zero(other):
        return 0.0
    if not np.any(b):
        return None
    factor = float(a @ b / (b @ b))
    residual = float(np.linalg.norm(a - factor * b))
    return factor if residual <= _shape(one, other) * max(float(np.linalg.norm(a)), 1e-300) else None


def has_factor(one: Fingerprint, other: Fingerprint) -> bool:
    """Return True if two tensors are proportional and their factor explains most of the difference."""
    factor = factor_between(one, other)
    if factor is None:
        return False
    a, b = np.asarray(one.projections), np.asarray(other.projections)
    return abs(factor - 1.0) * float(np.linalg.norm(b)) > 2.0 * float(np.linalg.norm(a - factor * b))


def _is_zero(one: Fingerprint) -> bool:
    return one.norm == 0.0


def _shape(one: Fingerprint, other: Fingerprint) -> float:
    """Return how far one tensor may be from a multiple of the other, which includes rounding in half precision."""
    return max(SHAPE, _GRADIENT * max(one.unit, other.unit))


def _is_scaled(one: Fingerprint, other: Fingerprint, *, around: float) -> bool:
    """Return True if one is a multiple of the other, other than 1: rounding never is, so this is a true gradient.

    The factor may be -1, or 0 if the other tensor is too large to be rounded to zero.
    """
    factor = factor_between(one, other)
    spread = min(p.norm - _SPREAD * p.largest for p in (one, other))
    if factor is None or spread < 0.0:
        return False
    if factor == 0.0:
        return max(_rms(one), _rms(other)) > _ZERO * max(one.unit, other.unit) * around
    return abs(factor - 1.0) > _shape(one, other)


def _around(name: str, prints: Prints) -> float:
    """Return the largest RMS gradient nearby: in the parent of its own module, or further out if it is alone there."""
    inside = name.rpartition(".")[0].rpartition(".")[0]
    while True:
        others = [_rms(p) for n, p in prints.items() if n != name and (not inside or n.startswith(f"{inside}."))]
        if others or not inside:
            return max(others, default=0.0)
        inside = inside.rpartition(".")[0]


def _rms(one: Fingerprint) -> float:
    return one.norm / math.sqrt(max(one.numel, 1))


def _apart(one: Fingerprint, other: Fingerprint) -> float:
    """Return an estimate of the root mean square of the difference."""
    return one.distance(other) * max(_rms(one), _rms(other))
