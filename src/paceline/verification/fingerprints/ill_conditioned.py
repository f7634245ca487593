"""Parameters whose gradient is lost in rounding: what two recordings can't be judged by.

A convolution's bias before BatchNorm, a key's bias in attention, the magnitude of a normed weight: the true gradient
is zero, and what is computed is rounding, another in every order of summing. It has the size of float32's last places
of the gradients around it, and no direction. Adam makes full steps of it, so such weights part by the learning rate.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from paceline.verification.fingerprints.fingerprint import Fingerprint, Record, faint_size

SHAPE = 1e-3
_DIFFERENCE = 16.0  # units, of a small true gradient with rounding on it
_COARSE = 2.0**-20  # of units beyond it rounding itself is more than the floor
_SHARE = 16.0  # units, of the way that a weight goes, may be another way where its gradient is that coarse
_GRADIENT = 12.0  # units, of a gradient that is that coarse; nets of four layers parted by 2 to 10
_STEPS = 4.0  # two runs move both ways, and both moves are estimates
_SPREAD = 2.0  # fewer than about four elements may be in line by chance

Pair = tuple[Record, Record]
Prints = Mapping[str, Fingerprint]


class IllConditionedCheck:
    """Says of each difference whether rounding alone explains it; asked in the order of the steps."""

    def __init__(self, pairs: Iterable[Pair], *, floor: float) -> None:
        self._floor = floor
        self._gradients: dict[int, tuple[dict[str, Fingerprint], ...]] = {}
        self._weights: dict[int, tuple[dict[str, Fingerprint], ...]] = {}
        for pair in pairs:  # of several optimizers each has its own record of a step
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
        """Those that were in doubt at any step so far."""
        return sorted(self._moved)

    def gradient(self, name: str, step: int) -> bool:
        """Whether both gradients, or their difference, are of the size of rounding, and no factor is between them."""
        one, other = (prints[name] for prints in self._gradients[step])
        unit = max(one.unit, other.unit)
        around = min(_around(name, prints) for prints in self._gradients[step])
        apart = _apart(one, other)
        if not math.isfinite(apart + around):
            return False
        if unit > _COARSE and apart <= _GRADIENT * unit * max(_rms(one), _rms(other)):
            return True
        is_noise = max(_rms(one), _rms(other)) <= faint_size(unit) * around or apart <= _DIFFERENCE * unit * around
        if not is_noise or _is_scaled(one, other):
            return False
        others = [move for n, move in self._moves(step).items() if n != name and n not in self._moved]
        self._moved[name] = self._moved.get(name, 0.0) + _STEPS * max(others, default=0.0)
        return True

    def weight(self, name: str, step: int) -> bool:
        """Whether what the optimizer may have made of such gradients explains it."""
        one, other = (prints[name] for prints in self._weights[step])
        here = self._moved.get(name, 0.0) + self._faint.get(name, 0.0) + self._coarse.get(name, 0.0)
        unit = max(one.unit, other.unit)
        rounded = unit * math.sqrt(max(step, 1)) if unit > _COARSE else 0.0
        allowed = here + (self._floor + rounded) * max(_rms(one), _rms(other))
        apart = _apart(one, other)
        return (here > 0.0 or rounded > 0.0) and math.isfinite(apart + allowed) and apart <= allowed

    def step(self, step: int) -> None:
        """Reckon how far weights may part in this step by what rounds in their gradients.

        A tensor may be in part without a true gradient, as a fused query, key and value bias is in its middle: its
        faint elements go by whole steps of Adam. In half precision all of a gradient is as coarse as its unit.
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
        """How far each weight went since the step before, in the run where it went further."""
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
    """The number that turns one tensor into the other, if there is one."""
    a, b = np.asarray(one.projections), np.asarray(other.projections)
    if not np.any(b):
        return None
    factor = float(a @ b / (b @ b))
    residual = float(np.linalg.norm(a - factor * b))
    return abs(factor) if residual <= _shape(one, other) * max(float(np.linalg.norm(a)), 1e-300) else None


def _shape(one: Fingerprint, other: Fingerprint) -> float:
    """How far one may be from a multiple of the other; in half precision rounding is in between."""
    return max(SHAPE, _GRADIENT * max(one.unit, other.unit))


def _is_scaled(one: Fingerprint, other: Fingerprint) -> bool:
    """Rounding has no direction that two runs share: what has one is a gradient, however small."""
    factor = factor_between(one, other)
    spread = min(one.norm - _SPREAD * one.largest, other.norm - _SPREAD * other.largest)
    return factor is not None and abs(factor - 1.0) > _shape(one, other) and spread >= 0.0


def _around(name: str, prints: Prints) -> float:
    """The largest size of a gradient around it: in the module that holds its own module, or further out if alone."""
    inside = name.rpartition(".")[0].rpartition(".")[0]
    while True:
        others = [_rms(p) for n, p in prints.items() if n != name and (not inside or n.startswith(f"{inside}."))]
        if others or not inside:
            return max(others, default=0.0)
        inside = inside.rpartition(".")[0]


def _rms(one: Fingerprint) -> float:
    return one.norm / math.sqrt(max(one.numel, 1))


def _apart(one: Fingerprint, other: Fingerprint) -> float:
    """An estimate of the root mean square of the difference."""
    return one.distance(other) * max(_rms(one), _rms(other))
