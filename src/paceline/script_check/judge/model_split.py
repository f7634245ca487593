"""The way in which a script splits its model over ranks by itself, on plain tensors, as Megatron-LM does.

The start weights tell it. A parameter that only some ranks have belongs to a stage or is an expert; one of other shapes
or other values on other ranks is cut into pieces; one with equal values is a replica on these ranks. Weights that
somebody forgot to seed have other values too, but then their gradients are reduced with those of all ranks.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from paceline.console.formatting import plural
from paceline.script_check.judge.reduction import fit_weights
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep
from paceline.script_check.recording import UNKNOWN_PARAMETER, TensorPrint

_CONSTANT = 1e-6  # relative, of a norm that all elements of equal size have
_RESIDUAL = 1e-2  # relative, of a gradient that follows from those of some ranks
_SHARED = 0.5  # share of equal samples from which on two ranks read the same ones
Ranks = tuple[int, ...]
Key = tuple[int, str]  # the optimizer and the name of a parameter


@dataclass(frozen=True, kw_only=True)
class ModelSplit:
    """A model that is split over ranks. `replicas` has the groups of ranks with equal start values of each parameter.

    `pieces` are the parameters that all ranks have, and with other values, and `local` those of some ranks only.
    `constant` ones have a single value at the start, which proves nothing. `is_clear`: other parameters are equal on
    all ranks, or the shapes or names differ. `by_gradients`: all weights start equal, but the ranks compute other
    gradients of them from the same samples.
    """

    replicas: Mapping[Key, tuple[Ranks, ...]]
    pieces: frozenset[Key]
    local: frozenset[Key]
    constant: frozenset[Key]
    world_size: int
    is_clear: bool = True
    by_gradients: bool = False

    def are_peers(self, first: int, second: int) -> bool:
        """Return whether two ranks have other parts of the model, so that each needs the other one's samples."""
        if self.by_gradients:
            return True
        return any(
            not any(first in ranks and second in ranks for ranks in groups)
            for key, groups in self.replicas.items()
            if key not in self.constant and any(rank in ranks for ranks in groups for rank in (first, second))
        )

    @property
    def description(self) -> str:
        """A sentence about the structure."""
        whole = {key for key, groups in self.replicas.items() if len(groups) == 1 and len(groups[0]) == self.world_size}
        parts = []
        if self.local:
            parts.append(f"{plural(len(self.local), 'parameter')} on some ranks only, as stages or experts")
        if self.pieces:
            sizes = {len(self.replicas[key]) for key in self.pieces}
            parts.append(f"{plural(len(self.pieces), 'parameter')} in {' or '.join(map(str, sorted(sizes)))} pieces")
        parts.append(f"{len(whole - self.constant)} on all ranks alike")
        if whole & self.constant:
            parts.append(f"{len(whole & self.constant)} constant at the start, of which this is not known")
        return f"the model is split by hand over {self.world_size} ranks: {', '.join(parts)}"


def find_split(run: ScriptRun) -> ModelSplit | None:
    """Return how a script splits its model; None if each rank has all of it, or if DTensors tell the parts."""
    if run.world_size < 2 or run.sharding:
        return None
    replicas = {(step.optimizer, name): groups for step in run.start for name, groups in _replicas(step).items()}
    constant = frozenset((step.optimizer, name) for step in run.start for name in _constant_names(step))
    count = run.world_size
    local = frozenset(key for key, groups in replicas.items() if sum(map(len, groups)) < count)
    pieces = frozenset(key for key, groups in replicas.items() if key not in local and len(groups) > 1)
    random = replicas.keys() - constant
    reshaped = {key for key in pieces if _has_other_shapes(run, key)}
    split = ModelSplit(replicas=replicas, pieces=pieces, local=local, constant=constant, world_size=count)
    if local or reshaped:
        return split if _step_alone(run, replicas, local | pieces) else None
    if pieces and _step_alone(run, replicas, pieces):
        if random - pieces:
            return split
        return _unclear(split) if read_same_samples(run) else None
    if not pieces and random and _compute_other_gradients(run):
        return ModelSplit(
            replicas=replicas, pieces=pieces, local=local, constant=constant, world_size=count, by_gradients=True
        )
    return None


def read_same_samples(run: ScriptRun) -> bool:
    """Return whether some ranks read the same samples at most steps."""
    return any(_share_samples(run, first, second) for first, second in combinations(range(run.world_size), 2))


def _unclear(split: ModelSplit) -> ModelSplit:
    return ModelSplit(
        replicas=split.replicas,
        pieces=split.pieces,
        local=split.local,
        constant=split.constant,
        world_size=split.world_size,
        is_clear=False,
    )


def _replicas(step: ScriptStep) -> dict[str, tuple[Ranks, ...]]:
    """Return the groups of ranks that have equal values of each parameter."""
    groups: dict[str, dict[int, list[int]]] = {}
    for rank, weights in enumerate(step.weights):
        for name, each in weights.items():
            if not name.startswith(UNKNOWN_PARAMETER):
                groups.setdefault(name, {}).setdefault(each.digest, []).append(rank)
    return {name: tuple(tuple(ranks) for ranks in by_value.values()) for name, by_value in groups.items()}


def _constant_names(step: ScriptStep) -> Iterator[str]:
    for name in {name for weights in step.weights for name in weights}:
        if all(_is_constant(weights[name]) for weights in step.weights if name in weights):
            yield name


def _is_constant(tensor: TensorPrint) -> bool:
    """Return whether all elements have the same size, as those of a new bias or of a new norm."""
    if tensor.numel == 1:
        return tensor.norm in (0.0, 1.0)
    return bool(abs(tensor.norm - tensor.largest * np.sqrt(tensor.numel)) <= _CONSTANT * max(tensor.norm, 1e-300))


def _has_other_shapes(run: ScriptRun, key: Key) -> bool:
    optimizer, name = key
    start = next(step for step in run.start if step.optimizer == optimizer)
    sizes = {weights[name].numel for weights in start.weights if name in weights}
    shapes = {rank.shapes[name] for rank in start.ranks if name in rank.shapes}
    return len(sizes) > 1 or len(shapes) > 1


def _step_alone(run: ScriptRun, replicas: Mapping[Key, tuple[Ranks, ...]], keys: frozenset[Key]) -> bool:
    """Return whether the parameters step with the gradients of the ranks that have equal values of them, in most cases.

    Those whose own gradients were not seen say nothing.
    """
    votes = Counter[bool]()
    for step in _first_steps(run):
        for optimizer, name in keys:
            if optimizer == step.optimizer:
                for ranks in replicas[optimizer, name]:
                    fitted = fit_group(step, name, ranks)
                    votes[fitted.residual <= _RESIDUAL] += fitted.is_seen
    return votes[True] >= votes[False]


@dataclass(frozen=True, kw_only=True)
class GroupFit:
    """The gradients of a group of ranks as weighted sums of those that they computed themselves.

    `factors` has for each rank the sum of the weights of its gradient, and `is_own` whether it is its own one alone.
    """

    is_seen: bool
    residual: float = 0.0
    factors: Mapping[int, float] | None = None
    is_own: bool = False


def fit_group(step: ScriptStep, name: str, ranks: Sequence[int]) -> GroupFit:
    """Return how the gradients of a parameter follow from the own gradients of these ranks."""
    if not all(name in step.ranks[rank].own_gradients and name in step.gradients[rank] for rank in ranks):
        return GroupFit(is_seen=False)
    columns = np.array([np.sum(step.ranks[rank].own_gradients[name], axis=0) for rank in ranks]).T
    if not np.all(np.isfinite(columns)) or not np.any(columns):
        return GroupFit(is_seen=False)
    residual, factors, is_own = 0.0, dict[int, float](), True
    for place, rank in enumerate(ranks):
        target = np.array(step.gradients[rank][name].projections)
        alone, rest_alone = fit_weights(target, columns[:, place : place + 1])
        weights, rest = fit_weights(target, columns)
        residual = max(residual, rest)
        is_own = is_own and rest_alone <= _RESIDUAL
        factors[rank] = float(alone[0] if rest_alone <= _RESIDUAL else weights.sum())
    return GroupFit(is_seen=True, residual=residual, factors=factors, is_own=is_own and len(ranks) > 1)


def _compute_other_gradients(run: ScriptRun) -> bool:
    """Return whether the ranks compute other gradients from the same samples and weights, without random numbers."""
    steps = _first_steps(run)
    if not steps or not all(_share_samples(run, 0, rank) for rank in range(1, run.world_size)):
        return False
    for step in steps:
        draws = any(call.random_state for rank in step.ranks for call in rank.calls)
        columns = [step.own(name) for name in step.judged_names]
        if draws or not columns:
            return False
        stacked = np.vstack([each / max(float(np.linalg.norm(each)), 1e-300) for each in columns])
        if np.linalg.norm(stacked - stacked[:, :1]) > 10 * _RESIDUAL * np.linalg.norm(stacked):
            return True
    return False


def _share_samples(run: ScriptRun, first: int, second: int) -> bool:
    pairs = [(step.samples(first), step.samples(second)) for step in run.steps]
    judged = [(one, two) for one, two in pairs if len(one) > 1 and len(two) > 1]
    equal = [sum((one & two).values()) > _SHARED * min(sum(one.values()), sum(two.values())) for one, two in judged]
    return sum(equal) * 2 > len(judged)


def _first_steps(run: ScriptRun) -> list[ScriptStep]:
    """Return the first step of each optimizer that has summaries."""
    found: dict[int, ScriptStep] = {}
    for step in run.steps:
        if step.has_prints:
            found.setdefault(step.optimizer, step)
    return list(found.values())
