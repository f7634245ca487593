"""The reduction of gradients: those of a step are weighted sums of those that the ranks computed themselves.

The projections of tensors add up as the tensors do. So the weights with which the own gradients of all ranks, or of all
their backward passes, give the gradient of a step are the solution of a small least squares problem.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.script_check.judge.script_run import ScriptStep, Vector

_RESIDUAL = 2e-3  # relative, of a fit that explains the gradient; measured: float32 stays below 1e-4
_EQUAL = 5e-3  # relative, of weights that count as equal
_EXACT = 1e-6  # relative, of gradients that are the same but for the order of their sums
LOST = 0.01  # relative, of the weight of a backward pass that does not arrive
_SAME_FACTOR = 0.01  # relative, of factors of two parameters that count as the same
_MULTIPLES = ("mean", "scaled", "sum", "mean-twice")  # kinds that are a multiple of the mean
_MAX_PASSES = 32  # columns of a fit by backward passes


@dataclass(frozen=True, kw_only=True)
class Reduction:
    """The way in which the gradient of one rank, or of one parameter, follows from those of all ranks.

    `kind`: `mean`, `sum`, `mean-twice` (divided by the ranks once more), `scaled` (a multiple of the mean: `factor`),
    `own` (of this rank alone), `unequal` (each rank has another of the `weights`), `passes` (each backward pass has
    another one), `clipped-passes` (the same, as after clipping between the passes), `by-parameter` (each parameter has
    another multiple of the mean), `alike` (all ranks computed the same gradients),
    `stale` (with the gradient of the step before), `zero`, or `unexplained`.
    """

    kind: str
    weights: tuple[tuple[float, ...], ...] = ()
    factor: float = 1.0
    residual: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepReduction:
    """The reduction of one step on one rank; `parameters` has that of each one where they are not alike."""

    step: ScriptStep
    rank: int
    total: Reduction
    parameters: dict[str, Reduction] = field(default_factory=dict)

    @property
    def odd_parameters(self) -> dict[str, Reduction]:
        """The parameters that are reduced otherwise than the others."""
        usual = self.usual_kind
        return {name: each for name, each in self.parameters.items() if each.kind != usual}

    @property
    def usual_kind(self) -> str:
        """The kind of reduction that more of the reduced parameters have than any other."""
        all_kinds = Counter(each.kind for each in self.parameters.values())
        kinds = Counter({kind: count for kind, count in all_kinds.items() if kind not in ("own", "unexplained")})
        kinds = kinds or all_kinds
        return kinds.most_common(1)[0][0] if kinds else self.total.kind


def find_reductions(step: ScriptStep, *, before: ScriptStep | None) -> list[StepReduction]:
    """Return the reduction of a step on each rank; nothing if no own gradient was seen. `before` is the last step."""
    names = step.judged_names
    if not names:
        return []
    return [_find_reduction(step, rank, names, before) for rank in range(len(step.ranks))]


def _find_reduction(step: ScriptStep, rank: int, names: Sequence[str], before: ScriptStep | None) -> StepReduction:
    tolerance = max(_RESIDUAL, 2 * max(line.own_eps for line in step.ranks))
    own = {name: step.own(name) for name in names}
    target = {name: np.array(step.gradients[rank][name].projections) for name in names}
    sizes = {name: max(float(np.linalg.norm(own[name])), 1e-300) for name in names}
    if not any(np.any(values) for values in target.values()):
        return StepReduction(step=step, rank=rank, total=Reduction(kind="zero"))
    stacked = np.concatenate([target[name] / sizes[name] for name in names])
    columns = np.vstack([own[name] / sizes[name] for name in names])
    weights, residual = fit_weights(stacked, columns)
    if residual <= tolerance:
        if _are_equal(columns, tolerance):
            explained = Reduction(kind="alike", factor=float(np.sum(weights)))
        elif np.linalg.norm(stacked - columns[:, rank]) <= _EXACT * np.linalg.norm(stacked):
            explained = Reduction(kind="own")  # also if the other gradients are too small for a weight of theirs
        else:
            explained = _classify(weights, rank, tolerance)
        return StepReduction(step=step, rank=rank, total=explained)
    total = _explain_by_passes(step, rank, names, sizes, stacked, tolerance)
    if total is None and before is not None:
        total = _explain_by_last_step(step, rank, names, own, target, before, tolerance)
    parameters = {}
    if total is None:
        for name in names:
            weights, rest = fit_weights(target[name], own[name])
            is_explained = rest <= 5 * tolerance
            parameters[name] = (
                _classify(weights, rank, tolerance) if is_explained else Reduction(kind="unexplained", residual=rest)
            )
        parameters, kind = _explain_by_parameter(parameters, count=len(step.ranks))
        total = Reduction(kind=kind, residual=residual)
    return StepReduction(step=step, rank=rank, total=total, parameters=parameters)


def _explain_by_passes(
    step: ScriptStep, rank: int, names: Sequence[str], sizes: dict[str, float], stacked: Vector, tolerance: float
) -> Reduction | None:
    """Return the weight of each backward pass, if the ranks made equally many and their weights explain the step."""
    counts = {len(line.own_gradients[name]) for line in step.ranks for name in names}
    if len(counts) > 1 or counts == {1} or len(step.ranks) * max(counts) > _MAX_PASSES:
        return None
    weights, residual = fit_weights(stacked, np.vstack([step.passes(name) / sizes[name] for name in names]))
    if residual > tolerance:
        return None
    table = weights.reshape(len(step.ranks), -1)
    rows = tuple(tuple(round(float(value), 5) + 0.0 for value in row) for row in table)
    return Reduction(kind="clipped-passes" if _are_clipped(table) else "passes", weights=rows)


def _are_clipped(table: Vector) -> bool:
    """Return whether later passes count more and the last one of all ranks alike, as if each pass is clipped."""
    last = table[:, -1]
    is_rising = bool(np.all(np.diff(table, axis=1) >= -_EQUAL * last.mean()))
    is_complete = bool(np.all(table > LOST * table.max(axis=0)))
    return is_rising and is_complete and bool(np.ptp(last) <= _EQUAL * last.mean())


def _explain_by_parameter(parameters: dict[str, Reduction], *, count: int) -> tuple[dict[str, Reduction], str]:
    """Return the reductions of the parameters, and `by-parameter` if each one is a positive multiple of the mean.

    If all multiples are the same one, but for some parameters that have as many times or parts of it as there are
    ranks, these are reduced otherwise.
    """
    values = {name: each.factor for name, each in parameters.items() if each.kind in _MULTIPLES}
    if count < 2 or len(values) < len(parameters) or min(values.values()) <= 0:
        return parameters, "unexplained"
    usual = float(np.median(list(values.values())))
    others = {name: value / usual for name, value in values.items() if abs(value / usual - 1) > _SAME_FACTOR}
    kinds = {
        name: kind
        for name, ratio in others.items()
        for kind, times in (("sum", count), ("mean-twice", 1 / count))
        if abs(ratio / times - 1) < _SAME_FACTOR
    }
    if len(kinds) == len(others) and len(others) * 2 < len(parameters):
        common = Reduction(kind="mean" if abs(usual - 1) < _SAME_FACTOR else "scaled", factor=usual)
        odd = {name: Reduction(kind=kind, factor=values[name]) for name, kind in kinds.items()}
        return {name: odd.get(name, common) for name in parameters}, "unexplained"
    return parameters, "by-parameter"


def _explain_by_last_step(
    step: ScriptStep,
    rank: int,
    names: Sequence[str],
    own: dict[str, Vector],
    target: dict[str, Vector],
    before: ScriptStep,
    tolerance: float,
) -> Reduction | None:
    """Return `stale` if the gradient contains that of the step before: nobody has set it to zero."""
    names = [name for name in names if name in before.gradients[rank]]
    if not names:
        return None
    last = {name: np.array(before.gradients[rank][name].projections) for name in names}
    sizes = {name: max(float(np.linalg.norm(own[name])), 1e-300) for name in names}
    columns = np.vstack([np.column_stack([own[name], last[name]]) / sizes[name] for name in names])
    weights, residual = fit_weights(np.concatenate([target[name] / sizes[name] for name in names]), columns)
    is_stale = residual <= tolerance and abs(float(weights[-1]) - 1.0) < 0.05
    return Reduction(kind="stale", residual=residual) if is_stale else None


def _are_equal(columns: Vector, tolerance: float) -> bool:
    """Return whether several ranks computed the same gradients, so that a mean of them is the gradient of each one."""
    distance = float(np.linalg.norm(columns - columns[:, :1]))
    return columns.shape[1] > 1 and distance <= tolerance * float(np.linalg.norm(columns))


def _classify(weights: Vector, rank: int, tolerance: float) -> Reduction:
    """Return what the weights of the ranks' own gradients mean."""
    count = len(weights)
    others = np.delete(weights, rank)
    if count > 1 and np.max(np.abs(others)) < tolerance * abs(weights[rank]):
        return Reduction(kind="own", factor=float(weights[rank]))
    mean = float(np.mean(weights))
    if np.max(np.abs(weights - mean)) > max(_EQUAL, tolerance) * abs(mean):
        return Reduction(kind="unequal", weights=(tuple(round(float(value), 3) for value in weights),))
    for kind, value in (("mean", 1 / count), ("sum", 1.0), ("mean-twice", 1 / count**2)):
        if abs(mean / value - 1) < tolerance:
            return Reduction(kind=kind, factor=value * count)
    return Reduction(kind="scaled", factor=mean * count)


def fit_weights(target: Vector, columns: Vector) -> tuple[Vector, float]:
    """Return the weights with which the columns give the target, and the relative rest."""
    norms = np.linalg.norm(columns, axis=0)
    norms[norms == 0] = 1.0
    weights: Vector = (np.linalg.lstsq(columns / norms, target, rcond=1e-6)[0] / norms).astype(np.float64)
    rest = float(np.linalg.norm(target - columns @ weights) / max(float(np.linalg.norm(target)), 1e-300))
    return weights, rest if np.isfinite(rest) else float("inf")
