"""The first rung: one process against itself. What fails here no layout can mend."""

import math
from collections.abc import Callable, Sequence
from statistics import median

import torch

from paceline.feed.stream import checksum
from paceline.place.batchnorm import running
from paceline.prove.dropout import NoDropout, quiet
from paceline.prove.finding import DIFFERENT, Finding, judged
from paceline.prove.noise import Kept, distance, floors, is_rounding
from paceline.prove.reading import num_rows
from paceline.prove.reference import At, Gradient, Micro, Reference

_SUM = 1e-4
_EPS = 16
_TWICE = 0.5
_MOST_CUT = 4
_DRAWS = (
    "the job: the same batch twice has other gradients; the model or loss draws numbers of its own "
    "(a random generator that is not seeded anew for each microbatch), or keeps state that is no buffer"
)
_ORDER = (
    "the job: the order of the samples is another one when it is asked for again; order= or the DataLoader's sampler "
    "draws from a generator that is not seeded, or keeps one from epoch to epoch"
)
_START = At(step=0, epoch=0, position=0)


def run_single(make: Callable[[], Reference]) -> Finding:
    """The same batch twice, then in halves: is the job deterministic, and is its loss a sum?"""
    finding = Finding()
    _twice(make, finding)
    _halves(make(), finding)
    return finding


def _twice(make: Callable[[], Reference], finding: Finding) -> None:
    first, second = make(), make()
    for name, value in Kept(first.model).tensors.items():
        if distance(value, Kept(second.model).tensors[name]):
            finding.blame(step=1, parameter=name, cause="the job: built twice from one seed, the model is not the same")
            return
    one, other = first.pieces(_START), second.pieces(_START)
    if [piece.samples for piece in one] != [piece.samples for piece in other]:
        finding.blame(step=1, parameter="(data)", cause=_ORDER)
        return
    differing = _other_contents(one, other)
    if differing is not None:
        cause = f"the job: microbatch {differing} read twice is not the same; train_data draws numbers of its own"
        finding.blame(step=1, parameter="(data)", cause=cause)
        return
    start = Kept(first.model)
    gradient, again = first.gradient(_START, pieces=one), second.gradient(_START, pieces=other)
    _compare(finding, first, gradient, again, one, start)
    if finding.verdict != DIFFERENT:
        finding.detail = "Deterministic." if finding.max_difference == 0.0 else "Deterministic to rounding."
        finding.detail += _fewer_rows(one)


def _fewer_rows(pieces: Sequence[Micro]) -> str:
    """A collation that leaves samples out; one that packs them all into one row is taken for what it is."""
    for index, piece in enumerate(pieces):
        rows, samples = num_rows(piece.data), len(piece.samples)
        if 1 < rows < samples:
            return (
                f" The collation gives {rows} rows for the {samples} samples of microbatch {index}: are some dropped?"
            )
    return ""


def _compare(
    finding: Finding, first: Reference, one: Gradient, other: Gradient, pieces: Sequence[Micro], start: Kept
) -> None:
    apart = {name: distance(value, other.total[name]) for name, value in one.total.items()}
    finding.count("gradients", len(apart))
    if not any(apart.values()):
        return
    if not is_rounding(one, other, first):
        name = max(apart, key=lambda key: apart[key])
        finding.blame(step=1, parameter=name, cause=_DRAWS)
        return
    floor = floors(first, one, at=_START, pieces=pieces, start=start).gradients
    for name in sorted(apart, key=lambda key: -apart[key] / max(floor[key], 1e-300)):
        verdict = judged(apart[name], floor[name])
        finding.note(verdict, difference=apart[name], floor=floor[name])
        if verdict == DIFFERENT:
            finding.blame(step=1, parameter=name, cause=_DRAWS)


def _halves(reference: Reference, finding: Finding) -> None:
    """Parts of a microbatch must add up to it, where samples do not see each other.

    Halves alone may hold equally many targets by chance, so one sample against the rest is tried too.
    """
    if finding.verdict == DIFFERENT:
        return
    if reference.spec.autocast is not None:  # half precision would hide what is looked for
        reference = reference.with_spec(autocast=None)
    if reference.job.loss_over == "batch":
        finding.detail += " The loss is over the whole batch: parts need not add up to it."
        return
    if running(reference.model):
        finding.detail += " Halves were not compared: samples of a microbatch share BatchNorm statistics."
        return
    pieces = [piece for piece in reference.pieces(_START) if len(piece.samples) > 1][:_MOST_CUT]
    cuts = [(piece, at) for piece in pieces for at in sorted({1, len(piece.samples) // 2})]
    if not cuts:
        return
    eps = max((torch.finfo(p.dtype).eps for p in reference.model.parameters() if p.requires_grad), default=0.0)
    least = max(_SUM, _EPS * eps)
    with quiet([reference.model]), NoDropout():
        found = [_cut(reference, piece, at) for piece, at in cuts]
        apart, _, divides_by_samples = max(found)
        draws = apart > least and _draws(reference, pieces[0]) > least
    factor = median(each for _, each, _ in found)
    if apart <= least:
        finding.detail += " The loss is a sum over samples."
        return
    if draws:
        finding.detail += " Halves were not compared: the forward draws random numbers that are no dropout."
        return
    why, hint = "a scalar loss counts as the mean over samples" if divides_by_samples else "", "loss=(sum, count)"
    if abs(factor - 2.0) < _TWICE and reference.job.loss is not None:
        why, hint = "twice as much, as a mean that was given beside a count is", "reduction='sum' beside the count"
    finding.warning = (
        f"the loss is no sum over samples: parts of a microbatch do not add up to it ({apart:.1e} apart"
        f"{f'; {why}' if why else ''}), so results depend on micro_batch_size, in one process too. Hint: {hint}."
    )


def _cut(reference: Reference, piece: Micro, at: int) -> tuple[float, float, bool]:
    """How far, relatively, the gradient of a microbatch is from that of its two parts; NaN counts as infinite.

    Then how often it fits into that of the parts, and whether it is divided by the number of samples.
    """
    read = reference.reading.read
    parts = [
        Micro(samples=part, data=reference.cast(read(epoch=0, part=part)))
        for part in (piece.samples[:at], piece.samples[at:])
    ]
    right, found = reference.gradient(_START, pieces=[piece]), reference.gradient(_START, pieces=parts)
    size = math.hypot(*(float(value.double().norm()) for value in right.total.values()))
    apart = math.hypot(*(distance(value, found.total[name]) for name, value in right.total.items()))
    if not math.isfinite(size):  # a microbatch without a target has no mean, in whatever parts
        return 0.0, 1.0, False
    ratio = apart / size if size else apart
    along = sum(float((value.double() * found.total[name].double()).sum()) for name, value in right.total.items())
    factor = along / size**2 if size else 1.0
    return (ratio if ratio == ratio else math.inf), factor, right.divisor == len(piece.samples)


def _draws(reference: Reference, piece: Micro) -> float:
    """How far, relatively, the gradient of a microbatch is from its own with other random numbers."""
    one = reference.gradient(_START, pieces=[piece]).total
    other = reference.gradient(_START, pieces=[piece], stream=lambda _: 1).total
    size = math.hypot(*(float(value.double().norm()) for value in one.values()))
    apart = math.hypot(*(distance(value, other[name]) for name, value in one.items()))
    return apart / size if size else apart


def _other_contents(one: Sequence[Micro], other: Sequence[Micro]) -> int | None:
    pairs = enumerate(zip(one, other, strict=True))
    return next((i for i, (a, b) in pairs if checksum(a.data, 0) != checksum(b.data, 0)), None)
