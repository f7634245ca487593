"""The first rung: one process against itself. What fails here no layout can mend."""

from collections.abc import Callable, Sequence

from paceline.feed.stream import checksum
from paceline.place.batchnorm import running
from paceline.prove.dropout import quiet
from paceline.prove.finding import DIFFERENT, Finding, judged
from paceline.prove.noise import Kept, distance, floors
from paceline.prove.reference import At, Gradient, Micro, Reference

_SUM = 1e-4
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
            finding.blame(step=0, parameter=name, cause="the job: built twice from one seed, the model is not the same")
            return
    one, other = first.pieces(_START), second.pieces(_START)
    differing = _other_contents(one, other)
    if differing is not None:
        cause = f"the job: microbatch {differing} read twice is not the same; train_data draws numbers of its own"
        finding.blame(step=0, parameter="(data)", cause=cause)
        return
    start = Kept(first.model)
    gradient, again = first.gradient(_START, pieces=one), second.gradient(_START, pieces=other)
    _compare(finding, first, gradient, again, one, start)
    if finding.verdict != DIFFERENT:
        finding.detail = "Deterministic." if finding.max_difference == 0.0 else "Deterministic to rounding."


def _compare(
    finding: Finding, first: Reference, one: Gradient, other: Gradient, pieces: Sequence[Micro], start: Kept
) -> None:
    apart = {name: distance(value, other.total[name]) for name, value in one.total.items()}
    finding.count("gradients", len(apart))
    if not any(apart.values()):
        return
    floor = floors(first, one, at=_START, pieces=pieces, start=start).gradients
    for name in sorted(apart, key=lambda key: -apart[key] / max(floor[key], 1e-300)):
        verdict = judged(apart[name], floor[name])
        finding.note(verdict, difference=apart[name], floor=floor[name])
        if verdict == DIFFERENT:
            cause = "the job: the same batch twice has other gradients; the model or loss draws numbers of its own"
            finding.blame(step=0, parameter=name, cause=cause)


def _halves(reference: Reference, finding: Finding) -> None:
    """Two half microbatches must add up to the whole, where samples do not see each other."""
    if finding.verdict == DIFFERENT:
        return
    if running(reference.model):
        finding.detail += " Halves were not compared: samples of a microbatch share BatchNorm statistics."
        return
    whole = reference.pieces(_START)[:1]
    if not whole or len(whole[0].samples) < 2:
        return
    samples = whole[0].samples
    middle = len(samples) // 2
    read = reference.reading.read
    parts = [Micro(samples=p, data=reference.cast(read(epoch=0, part=p))) for p in (samples[:middle], samples[middle:])]
    with quiet([reference.model]):
        right = reference.gradient(_START, pieces=whole)
        found = reference.gradient(_START, pieces=parts)
    size = sum(float(v.double().norm()) ** 2 for v in right.total.values()) ** 0.5
    apart = sum(distance(value, found.total[name]) ** 2 for name, value in right.total.items()) ** 0.5
    if apart <= _SUM * size:
        finding.detail += " The loss is a sum over samples."
        return
    scalar = "; a scalar loss counts as the mean over samples" if right.divisor == len(samples) else ""
    finding.detail += (
        f" The loss is no sum over samples: halves of a microbatch do not add up to it ({apart / size:.1e} "
        f"apart{scalar}), so results depend on micro_batch_size, in one process too. Hint: loss=(sum, count)."
    )


def _other_contents(one: Sequence[Micro], other: Sequence[Micro]) -> int | None:
    pairs = enumerate(zip(one, other, strict=True))
    return next((i for i, (a, b) in pairs if checksum(a.data, 0) != checksum(b.data, 0)), None)
