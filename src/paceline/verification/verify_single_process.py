"""The first rung: one process compared with itself. No layout can correct what fails here."""

import math
from collections.abc import Callable, Sequence
from statistics import median

import torch

from paceline.data.stream.iterable_loader import checksum
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.verification.noise_floor import ModelSnapshot, is_rounding, measure_floors
from paceline.verification.reference.dropout_isolation import NoDropout, has_dropout, without_dropout
from paceline.verification.reference.reference import Gradient, Micro, Reference, RunPosition
from paceline.verification.reference.sample_reader import num_rows
from paceline.verification.rung_result import DIFFERENT, RungResult, verdict_of_distance
from paceline.verification.tensor_distance import euclidean_distance, euclidean_norm, to_double

_SUM = 1e-4
_EPS = 16
_TWICE = 0.5
_MOST_CUT = 4
_NAMED = 3
_DRAWS = (
    "the job: the same batch gives different gradients the second time; the model or loss draws random numbers "
    "(a random generator that is not reseeded for each microbatch), or keeps state that is not a buffer"
)
_ORDER = (
    "the job: the order of the samples differs at the second call; order= or the DataLoader's sampler "
    "draws from an unseeded generator, or keeps one from epoch to epoch"
)
_START = RunPosition(step=0, epoch=0, position=0)


def run_single(make: Callable[[], Reference]) -> RungResult:
    """Run the same batch twice, then in halves, to test that the job is deterministic and its loss a sum."""
    rung_result = RungResult(by_micro=True)
    _twice(make, rung_result)
    _halves(make(), rung_result)
    return rung_result


def _twice(make: Callable[[], Reference], rung_result: RungResult) -> None:
    first, second = make(), make()
    for name, value in ModelSnapshot(first.model).tensors.items():
        if euclidean_distance(value, ModelSnapshot(second.model).tensors[name]):
            rung_result.blame(
                step=1, parameter=name, cause="the job builds other weights each time, although the seed is the same"
            )
            return
    one, other = first.pieces(_START), second.pieces(_START)
    if [piece.samples for piece in one] != [piece.samples for piece in other]:
        rung_result.blame(step=1, parameter="(data)", cause=_ORDER)
        return
    differing = _other_contents(one, other)
    if differing is not None:
        cause = f"the job: microbatch {differing} differs at the second read; train_data draws its own random numbers"
        rung_result.blame(step=1, parameter="(data)", cause=cause)
        return
    start = ModelSnapshot(first.model)
    gradient, again = first.gradient(_START, pieces=one), second.gradient(_START, pieces=other)
    _compare(rung_result, first, gradient, again, one, start)
    if rung_result.verdict != DIFFERENT:
        rung_result.left_out = _untrained(first, one[0])
        rung_result.detail = "Deterministic." if rung_result.max_difference == 0.0 else "Deterministic to rounding."
        rung_result.detail += _fewer_rows(one)


def _untrained(reference: Reference, piece: Micro) -> str:
    """Return a note on parameters that receive a gradient but are not the model's, so no optimizer holds them."""
    found = reference.strangers(piece)
    if not found:
        return ""
    shown = ", ".join(found[:_NAMED]) + (f" and {len(found) - _NAMED} more" if len(found) > _NAMED else "")
    return (
        f"{shown} of the loss or the forward: parameters that are not the model's and are not trained, in one process "
        "too. Hint: keep the loss's module in the model (self.criterion = ...), and let model= return it"
    )


def _fewer_rows(pieces: Sequence[Micro]) -> str:
    """Return a note about a collation that leaves samples out; one that packs all samples into one row is accepted."""
    for index, piece in enumerate(pieces):
        rows, samples = num_rows(piece.data), len(piece.samples)
        if 1 < rows < samples:
            return (
                f" The collation returns {rows} rows for the {samples} samples of microbatch {index}: are some dropped?"
            )
    return ""


def _compare(
    rung_result: RungResult,
    first: Reference,
    one: Gradient,
    other: Gradient,
    pieces: Sequence[Micro],
    start: ModelSnapshot,
) -> None:
    names = {**one.total, **other.total}
    zeros = {name: torch.zeros_like(value) for name, value in names.items()}
    apart = {n: euclidean_distance(one.total.get(n, zero), other.total.get(n, zero)) for n, zero in zeros.items()}
    rung_result.count("gradients", len(apart))
    if not any(apart.values()):
        return
    if not is_rounding(one, other, first):
        name = max(apart, key=lambda key: apart[key])
        rung_result.blame(step=1, parameter=name, cause=_DRAWS)
        return
    floor = measure_floors(first, one, at=_START, pieces=pieces, start=start).gradients
    for name in sorted(apart, key=lambda key: -apart[key] / max(floor.get(key, 0.0), 1e-300)):
        verdict = verdict_of_distance(apart[name], floor.get(name, 0.0))
        rung_result.note(verdict, difference=apart[name], floor=floor.get(name, 0.0))
        if verdict == DIFFERENT:
            rung_result.blame(step=1, parameter=name, cause=_DRAWS)


def _halves(reference: Reference, rung_result: RungResult) -> None:
    """Check that parts of a microbatch add up to it, if samples do not see each other.

    Halves may hold equally many targets by chance, so one sample against the rest is tried too.
    """
    if rung_result.verdict == DIFFERENT:
        return
    if reference.spec.autocast is not None:  # half precision would hide the difference
        reference = reference.with_spec(autocast=None)
    if reference.job.loss_over == "batch":
        rung_result.detail += " The loss is over the whole batch: parts need not add up to it."
        rung_result.by_micro = bool(norms_with_statistics(reference.model)) or _draws_per_microbatch(reference)
        return
    if norms_with_statistics(reference.model):
        rung_result.detail += " Halves were not compared: samples of a microbatch share BatchNorm statistics."
        return
    pieces = [piece for piece in reference.pieces(_START) if len(piece.samples) > 1][:_MOST_CUT]
    cuts = [(piece, at) for piece in pieces for at in sorted({1, len(piece.samples) // 2})]
    if not cuts:
        return
    eps = max((torch.finfo(p.dtype).eps for p in reference.model.parameters() if p.requires_grad), default=0.0)
    least = max(_SUM, _EPS * eps)
    with without_dropout([reference.model]), NoDropout():
        found = [_cut(reference, piece, at) for piece, at in cuts]
        apart, _, divides_by_samples = max(found)
        is_kept = apart > least and _again(reference, pieces[0], stream=0) > least
        draws = apart > least and _again(reference, pieces[0], stream=1) > least
    factor = median(each for _, each, _ in found)
    if apart <= least:
        rung_result.detail += " The loss is a sum over samples."
        rung_result.by_micro = _draws_per_microbatch(reference)
        return
    if is_kept:
        rung_result.detail += (
            " Halves were not compared: the model keeps state from one forward to the next (a hidden state, a "
            "cache, a counter, a buffer), so the same microbatch has a different gradient the second time."
        )
        return
    if draws:
        rung_result.detail += " Halves were not compared: the forward draws random numbers other than dropout."
        return
    why, hint = _reason(reference, pieces[0], factor=factor, divides_by_samples=divides_by_samples)
    rung_result.warning = (
        f"the loss is not a sum over samples: parts of a microbatch do not add up to it ({apart:.1e} off"
        f"{f'; {why}' if why else ''}), so results depend on micro_batch_size, in one process too. Hint: {hint}."
    )


def _reason(reference: Reference, piece: Micro, *, factor: float, divides_by_samples: bool) -> tuple[str, str]:
    """Return why the parts do not add up, and what the job could do about it."""
    if reference.job.loss is None:
        return "", "give loss=(sum, count) instead of the model's own loss"
    if abs(factor - 2.0) < _TWICE:
        return "twice as much, like a mean that is returned with a count", "reduction='sum' with the count"
    if not reference.gives_counts(piece):
        return "a scalar loss counts as the mean over samples" if divides_by_samples else "", "loss=(sum, count)"
    return (
        "although loss= returns (sum, count): the forward or the loss uses the whole microbatch (a mean over its "
        "samples, its length, pairs of samples)"
    ), "the same micro_batch_size in every run, or compute each sample independently"


def _cut(reference: Reference, piece: Micro, at: int) -> tuple[float, float, bool]:
    """Return the relative distance of a microbatch's gradient from that of its two parts; NaN counts as infinite.

    Also return the factor between the two gradients, and whether the gradient is divided by the number of samples.
    """
    read = reference.reading.read
    parts = [
        Micro(samples=part, data=reference.cast(read(epoch=0, part=part)))
        for part in (piece.samples[:at], piece.samples[at:])
    ]
    right, found = reference.gradient(_START, pieces=[piece]), reference.gradient(_START, pieces=parts)
    whole, apart = _size(right), _apart(right, found)
    if not math.isfinite(whole):  # a microbatch without a target has no mean, however it is cut
        return 0.0, 1.0, False
    ratio = apart / whole if whole else apart
    both = right.total.keys() & found.total.keys()
    along = sum(float((to_double(right.total[name]) * to_double(found.total[name])).sum()) for name in both)
    factor = along / whole**2 if whole else 1.0
    return (ratio if ratio == ratio else math.inf), factor, right.divisor == len(piece.samples)


def _draws_per_microbatch(reference: Reference) -> bool:
    """Return whether each microbatch draws its own numbers: in dropout layers, or anywhere in the forward or loss."""
    piece = next(iter(reference.pieces(_START)))
    return has_dropout(reference.model) or _again(reference, piece, stream=1) > 0.0


def _again(reference: Reference, piece: Micro, *, stream: int) -> float:
    """Return the relative distance of two gradients of one microbatch, the second with random stream `stream`."""
    one = reference.gradient(_START, pieces=[piece])
    other = reference.gradient(_START, pieces=[piece], stream=lambda _: stream)
    whole, apart = _size(one), _apart(one, other)
    return apart / whole if whole else apart


def _size(one: Gradient) -> float:
    return math.hypot(*(euclidean_norm(value) for value in one.total.values()))


def _apart(one: Gradient, other: Gradient) -> float:
    """Return the distance of two gradients; a missing parameter counts as zero."""
    names = {**one.total, **other.total}
    pairs = [(one.total.get(n, v * 0), other.total.get(n, v * 0)) for n, v in names.items()]
    return math.hypot(*(euclidean_distance(left, right) for left, right in pairs))


def _other_contents(one: Sequence[Micro], other: Sequence[Micro]) -> int | None:
    pairs = enumerate(zip(one, other, strict=True))
    return next((i for i, (a, b) in pairs if checksum(a.data, 0) != checksum(b.data, 0)), None)
