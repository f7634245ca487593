"""The first rung: one process compared with itself. A job that fails here fails in every layout."""

import math
from collections.abc import Callable, Sequence
from statistics import median

import torch

from paceline.data.stream.iterable_loader import checksum
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.verification.noise_floor import ModelSnapshot, is_rounding, measure_floors
from paceline.verification.reference.dropout_isolation import NoDropout, has_dropout, without_dropout
from paceline.verification.reference.reference import Reference, ReferenceGradient, ReferenceMicrobatch, RunPosition
from paceline.verification.reference.sample_reader import num_rows
from paceline.verification.rung_result import DIFFERENT, RungResult, judge_distance
from paceline.verification.tensor_distance import euclidean_distance, euclidean_norm, to_double

# The gradients of two parts must add up to the gradient of the whole. The allowed relative distance is 1e-4, or 16
# machine epsilons if that is more.
_SUM_TOLERANCE = 1e-4
_SUM_TOLERANCE_EPS = 16
_FACTOR_TOLERANCE = 0.5  # how far from 2 a factor may be to count as "twice as much"
_MAX_SPLIT_MICROBATCHES = 4
_MAX_NAMES = 3
_NOT_DETERMINISTIC = (
    "the job: the same batch gives different gradients the second time; the model or loss draws random numbers "
    "(a random generator that is not reseeded for each microbatch), or keeps state that is not a buffer"
)
_UNSTABLE_ORDER = (
    "the job: the order of the samples differs at the second call; order= or the DataLoader's sampler "
    "draws from an unseeded generator, or continues a generator from epoch to epoch"
)
_START = RunPosition(steps_done=0, epoch=0, batch_start=0)


def verify_single_process(make_reference: Callable[[], Reference]) -> RungResult:
    """Run a batch twice, then in halves, to test that the job is deterministic and its loss a sum over samples."""
    rung_result = RungResult(depends_on_microbatches=True)  # until the comparison with halves shows otherwise
    _compare_repeated_batch(make_reference, rung_result)
    reference = make_reference()
    _compare_with_halves(reference, rung_result)
    if rung_result.verdict != DIFFERENT and rung_result.draws_random_numbers is None:
        rung_result.draws_random_numbers = _reseeded_distance(reference) != 0.0
    return rung_result


def _compare_repeated_batch(make_reference: Callable[[], Reference], rung_result: RungResult) -> None:
    first, second = make_reference(), make_reference()
    for name, value in ModelSnapshot(first.model).tensors.items():
        if euclidean_distance(value, ModelSnapshot(second.model).tensors[name]):
            rung_result.record_difference(
                step=1,
                parameter=name,
                cause="the job builds different weights each time, although the seed is the same",
            )
            return
    first_microbatches, second_microbatches = first.read_microbatches(_START), second.read_microbatches(_START)
    if [micro.samples for micro in first_microbatches] != [micro.samples for micro in second_microbatches]:
        rung_result.record_difference(step=1, parameter="(data)", cause=_UNSTABLE_ORDER)
        return
    changed_index = _first_changed_microbatch(first_microbatches, second_microbatches)
    if changed_index is not None:
        cause = (
            f"the job: microbatch {changed_index} differs at the second read; train_data draws its own random numbers"
        )
        rung_result.record_difference(step=1, parameter="(data)", cause=cause)
        return
    start = ModelSnapshot(first.model)
    gradient, repeated = (
        first.compute_gradient(_START, microbatches=first_microbatches),
        second.compute_gradient(_START, microbatches=second_microbatches),
    )
    _compare_gradients(rung_result, first, gradient, repeated, first_microbatches, start)
    if rung_result.verdict != DIFFERENT:
        rung_result.left_out = _untrained_note(first, first_microbatches[0])
        rung_result.detail = "Deterministic." if rung_result.max_difference == 0.0 else "Deterministic to rounding."
        rung_result.detail += _dropped_rows_note(first_microbatches)


def _untrained_note(reference: Reference, microbatch: ReferenceMicrobatch) -> str:
    """Return a note on parameters outside the model that receive a gradient; no optimizer trains them."""
    names = reference.foreign_parameters(microbatch)
    if not names:
        return ""
    shown = ", ".join(names[:_MAX_NAMES]) + (f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else "")
    return (
        f"{shown} of the loss or the forward: not parameters of the model, so no optimizer trains them, not even "
        "in one process. Hint: keep the loss's module in the model (self.criterion = ...), and let model= return it"
    )


def _dropped_rows_note(microbatches: Sequence[ReferenceMicrobatch]) -> str:
    """Return a note if the collation seems to drop samples. A collation that packs all samples into one row is fine."""
    for index, microbatch in enumerate(microbatches):
        rows, samples = num_rows(microbatch.data), len(microbatch.samples)
        if 1 < rows < samples:
            return (
                f" The collation returns {rows} rows for the {samples} samples of microbatch {index}: are some dropped?"
            )
    return ""


def _compare_gradients(
    rung_result: RungResult,
    reference: Reference,
    gradient: ReferenceGradient,
    repeated: ReferenceGradient,
    microbatches: Sequence[ReferenceMicrobatch],
    start: ModelSnapshot,
) -> None:
    names = {**gradient.total, **repeated.total}
    zeros = {name: torch.zeros_like(value) for name, value in names.items()}
    distances = {
        n: euclidean_distance(gradient.total.get(n, zero), repeated.total.get(n, zero)) for n, zero in zeros.items()
    }
    rung_result.count_compared("gradients", len(distances))
    if not any(distances.values()):
        return
    if not is_rounding(gradient, repeated, reference):
        name = max(distances, key=lambda key: distances[key])
        rung_result.record_difference(step=1, parameter=name, cause=_NOT_DETERMINISTIC)
        return
    floors = measure_floors(reference, gradient, position=_START, microbatches=microbatches, start=start).gradients
    for name in sorted(distances, key=lambda key: -distances[key] / max(floors.get(key, 0.0), 1e-300)):
        verdict = judge_distance(distances[name], floors.get(name, 0.0))
        rung_result.record(verdict, difference=distances[name], floor=floors.get(name, 0.0))
        if verdict == DIFFERENT:
            rung_result.record_difference(step=1, parameter=name, cause=_NOT_DETERMINISTIC)


def _compare_with_halves(reference: Reference, rung_result: RungResult) -> None:
    """Check that the gradients of two parts of a microbatch add up to the gradient of the whole microbatch.

    They do if the samples are independent. Two halves may have equally many targets by chance, so a split after the
    first sample is tried too.
    """
    if rung_result.verdict == DIFFERENT:
        return
    if reference.config.autocast is not None:  # half precision would hide the difference
        reference = reference.with_config(autocast=None)
    if reference.job.loss_over == "batch":
        rung_result.detail += " The loss is over the whole batch, so it need not be the sum over parts of a batch."
        shares_statistics = bool(norms_with_statistics(reference.model))
        reseeded_distance = _reseeded_distance(reference)
        rung_result.depends_on_microbatches = shares_statistics or reseeded_distance > 0.0
        rung_result.draws_random_numbers = reseeded_distance != 0.0
        return
    if norms_with_statistics(reference.model):
        rung_result.detail += " Halves were not compared: samples of a microbatch share BatchNorm statistics."
        return
    microbatches = [micro for micro in reference.read_microbatches(_START) if len(micro.samples) > 1]
    microbatches = microbatches[:_MAX_SPLIT_MICROBATCHES]
    splits = [(micro, index) for micro in microbatches for index in sorted({1, len(micro.samples) // 2})]
    if not splits:
        return
    eps = max((torch.finfo(p.dtype).eps for p in reference.model.parameters() if p.requires_grad), default=0.0)
    tolerance = max(_SUM_TOLERANCE, _SUM_TOLERANCE_EPS * eps)
    with without_dropout([reference.model]), NoDropout():
        results = [_compare_split(reference, micro, index) for micro, index in splits]
        distance, _, divides_by_samples = max(results)
        keeps_state = (
            distance > tolerance and _rerun_distance(reference, microbatches[0], random_microbatch=0) > tolerance
        )
        draws_random_numbers = (
            distance > tolerance and _rerun_distance(reference, microbatches[0], random_microbatch=1) > tolerance
        )
    factor = median(factor for _, factor, _ in results)
    if distance <= tolerance:
        rung_result.detail += " The loss is a sum over samples."
        reseeded_distance = _reseeded_distance(reference)
        rung_result.depends_on_microbatches = reseeded_distance > 0.0
        rung_result.draws_random_numbers = reseeded_distance != 0.0
        return
    if keeps_state:
        rung_result.detail += (
            " Halves were not compared: the model keeps state from one forward to the next (a hidden state, a "
            "cache, a counter, a buffer), so the same microbatch has a different gradient the second time."
        )
        return
    if draws_random_numbers:
        rung_result.detail += " Halves were not compared: the forward draws random numbers other than dropout."
        return
    reason, hint = _explain_halves(reference, microbatches[0], factor=factor, divides_by_samples=divides_by_samples)
    rung_result.warning = (
        f"the loss is not a sum over samples: the gradients of two parts of a microbatch do not add up to its gradient "
        f"({distance:.1e} off"
        f"{f'; {reason}' if reason else ''}), so results depend on micro_batch_size, in one process too. Hint: {hint}."
    )


def _explain_halves(
    reference: Reference, microbatch: ReferenceMicrobatch, *, factor: float, divides_by_samples: bool
) -> tuple[str, str]:
    """Return why the gradients of the parts do not add up, and a hint. The reason is empty if it is not known.

    `factor` and `divides_by_samples` are results of `_compare_split`.
    """
    if reference.job.loss is None:
        return "", "give loss=(sum, count) instead of the model's own loss"
    if abs(factor - 2.0) < _FACTOR_TOLERANCE:
        return "twice as much, like a mean that is returned with a count", "reduction='sum' with the count"
    if not reference.returns_counts(microbatch):
        return "a scalar loss counts as the mean over samples" if divides_by_samples else "", "loss=(sum, count)"
    return (
        "although loss= returns (sum, count): the forward or the loss uses the whole microbatch (a mean over its "
        "samples, its length, pairs of samples)"
    ), "the same micro_batch_size in every run, or compute each sample independently"


def _compare_split(
    reference: Reference, microbatch: ReferenceMicrobatch, split_index: int
) -> tuple[float, float, bool]:
    """Compare the gradient of two parts of a microbatch with the gradient of the whole.

    Return three values: the distance of the two, relative to the norm of the whole gradient (NaN counts as infinite);
    the factor by which the parts' gradient is larger; and whether the divisor of the whole gradient is its number of
    samples.
    """
    read = reference.reader.read
    parts = [
        ReferenceMicrobatch(samples=part, data=reference.cast(read(epoch=0, indices=part)))
        for part in (microbatch.samples[:split_index], microbatch.samples[split_index:])
    ]
    expected, gradient = (
        reference.compute_gradient(_START, microbatches=[microbatch]),
        reference.compute_gradient(_START, microbatches=parts),
    )
    expected_norm, distance = _gradient_norm(expected), _gradient_distance(expected, gradient)
    if not math.isfinite(expected_norm):  # a microbatch without a target has no mean, however it is split
        return 0.0, 1.0, False
    ratio = distance / expected_norm if expected_norm else distance
    names = expected.total.keys() & gradient.total.keys()
    dot_product = sum(
        float((to_double(expected.total[name]) * to_double(gradient.total[name])).sum()) for name in names
    )
    factor = dot_product / expected_norm**2 if expected_norm else 1.0
    return (ratio if ratio == ratio else math.inf), factor, expected.divisor == len(microbatch.samples)


def _reseeded_distance(reference: Reference) -> float:
    """Return how far the gradient of the first microbatch moves with the random numbers of another microbatch.

    The distance is 0 if forward and loss draw no random numbers, infinite if the model has dropout, and NaN if the
    gradient is not finite.
    """
    if has_dropout(reference.model):
        return math.inf
    microbatch = next(iter(reference.read_microbatches(_START)))
    return _rerun_distance(reference, microbatch, random_microbatch=1)


def _rerun_distance(reference: Reference, microbatch: ReferenceMicrobatch, *, random_microbatch: int) -> float:
    """Return how far the gradient moves, relative to its norm, if the microbatch is run a second time.

    The second run draws the random numbers of the microbatch with index `random_microbatch`.
    """
    gradient = reference.compute_gradient(_START, microbatches=[microbatch])
    repeated = reference.compute_gradient(
        _START, microbatches=[microbatch], random_microbatch=lambda _: random_microbatch
    )
    norm, distance = _gradient_norm(gradient), _gradient_distance(gradient, repeated)
    return distance / norm if norm else distance


def _gradient_norm(gradient: ReferenceGradient) -> float:
    return math.hypot(*(euclidean_norm(value) for value in gradient.total.values()))


def _gradient_distance(first: ReferenceGradient, second: ReferenceGradient) -> float:
    """Return the distance of two gradients; a missing parameter counts as zero."""
    names = {**first.total, **second.total}
    pairs = [(first.total.get(n, v * 0), second.total.get(n, v * 0)) for n, v in names.items()]
    return math.hypot(*(euclidean_distance(left, right) for left, right in pairs))


def _first_changed_microbatch(
    first: Sequence[ReferenceMicrobatch], second: Sequence[ReferenceMicrobatch]
) -> int | None:
    pairs = enumerate(zip(first, second, strict=True))
    return next((i for i, (a, b) in pairs if checksum(a.data, 0) != checksum(b.data, 0)), None)
