"""The comparison of one process with ranks that hold its model in pieces, element by element of each piece."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from paceline.console.formatting import first_names, plural
from paceline.script_check.comparison.difference_cause import Cause, random_cause, with_reached_parameters
from paceline.script_check.comparison.script_records import fingerprint_of, step_eps
from paceline.script_check.judge.model_split import fit_group
from paceline.script_check.judge.reduction import fit_weights
from paceline.script_check.judge.script_run import ScriptRun, ScriptStep
from paceline.script_check.recording import PiecePrint, TensorPrint, UnknownPiece
from paceline.verification.fingerprints.fingerprint import Record
from paceline.verification.fingerprints.ill_conditioned import factor_between
from paceline.verification.rung_result import RECORDING_FLOOR

_FACTOR = 5e-3  # relative, of factors that count as equal
_NEAR = 1e-2  # relative, of a factor or a norm that has a known reason
_CLIPPED = 0.999  # a smaller factor is one of clipping


@dataclass(frozen=True)
class _Part:
    """A part of the model at a step: what one process has of it, and the gradient of the rank."""

    piece: PiecePrint
    one: TensorPrint
    many: TensorPrint
    eps: float

    @property
    def label(self) -> str:
        return _label(self.piece)

    @property
    def factor(self) -> float | None:
        """Return the ratio of the rank's gradient to the other one; None if they are not proportional."""
        return factor_between(fingerprint_of(self.many, eps=self.eps), fingerprint_of(self.one, eps=self.eps))

    @property
    def is_equal(self) -> bool:
        distance = fingerprint_of(self.one, eps=self.eps).distance(fingerprint_of(self.many, eps=self.eps))
        return distance <= max(RECORDING_FLOOR, 16 * self.eps)


def has_pieces(one: ScriptRun) -> bool:
    """Return whether a run has the pieces that the ranks of the other one hold."""
    return any(step.ranks[0].pieces or step.ranks[0].unknown_pieces for step in one.start)


def unknown_pieces(one: ScriptRun) -> list[UnknownPiece]:
    """Return the parameters of the ranks whose start values are nowhere in the process."""
    return [each for step in one.start for each in step.ranks[0].unknown_pieces]


def piece_records(one: ScriptRun, many: ScriptRun) -> tuple[list[Record], list[Record]]:
    """Return the steps of both runs, with an entry for each part of the model on each rank."""
    others = {(step.optimizer, step.number): step for step in [*many.start, *many.steps]}
    pairs = [
        (step, others[step.optimizer, step.number])
        for step in [*one.start, *one.steps]
        if step.has_prints and (step.optimizer, step.number) in others
    ]
    return [_record_of_one(*pair) for pair in pairs], [_record_of_many(*pair) for pair in pairs]


def piece_cause(one: ScriptRun, many: ScriptRun, *, step: int, called: tuple[str, str]) -> Cause:
    """Return why the gradients of a step differ."""
    steps = next(
        ((a, b) for a in one.steps for b in many.steps if a.number == b.number == step and a.optimizer == b.optimizer),
        None,
    )
    random = random_cause(one, many, step=step, called=called)
    if random is not None or steps is None:
        return random or Cause(text="the gradients differ")
    parts = list(_parts(*steps))
    return (
        _common_factor(*steps, parts, called)
        or _factor_of_some(parts, len(many.ranks), called)
        or _not_reduced(steps[1], parts, called)
        or _reached(parts, called)
    )


def _label(piece: PiecePrint) -> str:
    return f"{piece.name} on rank {piece.rank}"


def _record_of_one(one: ScriptStep, many: ScriptStep) -> Record:
    eps = max(step_eps(one), step_eps(many))
    pieces = one.ranks[0].pieces
    return Record(
        step=one.number,
        optimizer=one.optimizer,
        gradients={_label(each): fingerprint_of(each.gradient, eps=eps) for each in pieces if each.gradient},
        weights={_label(each): fingerprint_of(each.weight, eps=eps) for each in pieces},
    )


def _record_of_many(one: ScriptStep, many: ScriptStep) -> Record:
    eps = max(step_eps(one), step_eps(many))
    pieces = [each for each in one.ranks[0].pieces if each.rank < len(many.ranks)]
    gradients = {_label(each): many.gradients[each.rank].get(each.name) for each in pieces}
    weights = {_label(each): many.weights[each.rank].get(each.name) for each in pieces}
    return Record(
        step=many.number,
        optimizer=many.optimizer,
        gradients={name: fingerprint_of(each, eps=eps) for name, each in gradients.items() if each},
        weights={name: fingerprint_of(each, eps=eps) for name, each in weights.items() if each},
    )


def _parts(one: ScriptStep, many: ScriptStep) -> Iterator[_Part]:
    eps = max(step_eps(one), step_eps(many))
    for piece in one.ranks[0].pieces:
        gradient = many.gradients[piece.rank].get(piece.name)
        if piece.gradient is not None and gradient is not None:
            yield _Part(piece, piece.gradient, gradient, eps)


def _common_factor(one: ScriptStep, many: ScriptStep, parts: list[_Part], called: tuple[str, str]) -> Cause | None:
    """Return a cause if the gradients of all parts differ by one factor."""
    known = [part.factor for part in parts if part.one.norm]
    values = [factor for factor in known if factor]
    if not values or len(values) < len(known) or max(values) - min(values) > _FACTOR * abs(max(values)):
        return None
    factor = float(np.median(values))
    clips = _clip_factors(one, many, parts, factor)
    if clips is None:
        reasons = _reasons(factor, len(many.ranks))
        return Cause(text=f"the gradients of {called[1]} are {factor:.4g} times those of {called[0]}{reasons}")
    return Cause(
        text=f"{called[1]} clips the gradients by {clips[1]:.4g}, and {called[0]} by {clips[0]:.4g}: the norm of the"
        f" whole gradient is counted otherwise{_norm_reason(one, parts, factor)}",
        hint="add up the squared norms of all pieces over their ranks, and of each replicated parameter only once",
    )


def _clip_factors(one: ScriptStep, many: ScriptStep, parts: list[_Part], factor: float) -> tuple[float, float] | None:
    """Return the factors by which both runs multiply their gradients, if their ratio explains the difference."""
    of_one = [
        fitted.factors[0] for part in parts if (fitted := fit_group(one, part.piece.own_name, [0])).factors is not None
    ]
    if not of_one:
        return None
    clip = float(np.median(of_one))
    is_clipped = min(clip, clip * factor) < _CLIPPED and np.ptp(of_one) <= _NEAR * abs(clip)
    return (clip, clip * factor) if is_clipped else None


def _norm_reason(one: ScriptStep, parts: list[_Part], factor: float) -> str:
    """Return which parameters a norm counts several times, or leaves out, from how much larger or smaller it is."""
    whole = sum(each.norm**2 for each in one.gradients[0].values())
    excess = whole * (1 / factor**2 - 1)
    copies: dict[str, list[_Part]] = {}
    for part in parts:
        copies.setdefault(part.piece.own_name, []).append(part)
    replicated = {
        name: (len(each) - 1) * each[0].one.norm ** 2
        for name, each in copies.items()
        if len(each) > 1 and all(part.one.numel == one.gradients[0][name].numel for part in each)
    }
    counted = sum(replicated.values())
    if counted and abs(excess / counted - 1) < _NEAR:
        return f". Each of the {plural(len(replicated), 'replicated parameter')} counts once for each rank"
    for name, amount in replicated.items():
        if amount and abs(excess / amount - 1) < _NEAR:
            return f". {name}, which is replicated, counts once for each rank"
    missing = [(part.label, part.one.norm**2) for part in parts if part.piece.own_name not in replicated]
    missing += [(name, one.gradients[0][name].norm ** 2) for name in copies]
    close = [(abs(-excess / amount - 1), label) for label, amount in missing if amount]
    rest, label = min(close, default=(1.0, ""))
    return f". It leaves out {label}" if rest < _NEAR else ""


def _factor_of_some(parts: list[_Part], world_size: int, called: tuple[str, str]) -> Cause | None:
    """Return a cause if some gradients differ by one factor, and all others are equal."""
    differing = [part for part in parts if not part.is_equal]
    known = [part.factor for part in differing]
    values = [factor for factor in known if factor]
    if not values or len(values) < len(known) or max(values) - min(values) > _FACTOR * abs(max(values)):
        return None
    factor, names = float(np.median(values)), sorted({part.piece.own_name for part in differing})
    equal = {part.piece.own_name for part in parts} - set(names)
    others = f"; {plural(len(equal), 'other parameter')} {'has' if len(equal) == 1 else 'have'} equal ones"
    return Cause(
        text=f"the gradients of {first_names(names)} are {factor:.4g} times those of {called[0]}"
        f"{_reasons(factor, world_size)}{others if equal else ''}",
        hint=f"divide the gradients of {names[0]} as those of the others, and only once: neither its forward and its"
        " gradient, nor its gradient and its reduction",
    )


def _reasons(factor: float, world_size: int) -> str:
    if abs(factor / world_size - 1) < _NEAR:
        return f", the {world_size} ranks: a sum in place of a mean, or a loss multiplied by them"
    if abs(factor * world_size - 1) < _NEAR:
        return f", 1/{world_size}: divided by the ranks once more"
    return ""


def _not_reduced(many: ScriptStep, parts: list[_Part], called: tuple[str, str]) -> Cause | None:
    """Return a cause if the ranks' own gradients of replicas add up to those of one process, but nobody adds them."""
    found: dict[str, tuple[int, ...]] = {}
    for part in (each for each in parts if not each.is_equal):
        ranks = [each.piece.rank for each in parts if each.piece.own_name == part.piece.own_name]
        names = {each.piece.name for each in parts if each.piece.own_name == part.piece.own_name}
        if len(names) > 1 or len(ranks) < 2 or part.piece.num_padding:
            continue
        if all(part.piece.name in many.ranks[rank].own_gradients for rank in ranks):
            own = [np.sum(many.ranks[rank].own_gradients[part.piece.name], axis=0) for rank in ranks]
            if len(own[0]) == len(part.one.projections):
                weights, rest = fit_weights(np.array(part.one.projections), np.array(own).T)
                if rest < _NEAR and np.ptp(weights) < _NEAR * abs(float(weights.mean())):
                    found[part.piece.own_name] = tuple(ranks)
    if not found:
        return None
    first_ranks = next(iter(found.values()))
    return Cause(
        text=f"the own gradients of ranks {', '.join(map(str, first_ranks))} add up to the gradient of {called[0]} for"
        f" {first_names(sorted(found))}, and no rank steps with their sum: they are replicas, and are not reduced",
        hint="all_reduce the gradients of these parameters over the ranks that have them, before the step",
    )


def _reached(parts: list[_Part], called: tuple[str, str]) -> Cause:
    """Return a cause from which parameters have the right gradients."""
    differing = [part for part in parts if not part.is_equal]
    names = list(dict.fromkeys(part.piece.own_name for part in differing))
    equal = [name for name in dict.fromkeys(part.piece.own_name for part in parts) if name not in names]
    padded = list(dict.fromkeys(part.piece.name for part in differing if part.piece.num_padding))
    return with_reached_parameters(names, equal, padded, called)
