"""Read sample batches for profiling a model, and fit how a cost depends on the size of a batch."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from paceline.config.layout import parse_layout
from paceline.config.settings import Settings
from paceline.config.update_rule import parse_update
from paceline.data.types import BatchPartition, StepInput
from paceline.job import Job
from paceline.planner.layout.execution_plan import ExecutionPlan, JobFacts, Resources, make_execution_plan
from paceline.planner.model_costs.model_profile import BatchScaling
from paceline.torch_internals.pytree import map_tensors
from paceline.trainer.setup.job_data import JobData, read_first

FEW_SAMPLES, MORE_SAMPLES = 2, 3  # not 1: a model may have other code for a single sample
_MIN_RELATIVE_SIZE = 1e-3  # a smaller fraction of the cost is taken for a rounding error
_TOKENS_KEY = "input_ids"


def sequence_length(job: Job, settings: Settings) -> int | None:
    """Return the length of the job's sequences: that of its `sequence` dimension or of `input_ids`, or None."""
    batch = read_samples(job, settings, samples=1).micro[0].data
    if job.sequence is not None:
        lengths = [(batch[n] if isinstance(batch, dict) else batch[int(n)]).shape[d] for n, d in job.sequence.items()]
        return int(lengths[0])
    ids = batch.get(_TOKENS_KEY) if isinstance(batch, dict) else None
    return int(ids.shape[1]) if isinstance(ids, Tensor) and ids.dim() > 1 else None


def shorter_lengths(length: int | None) -> tuple[int, ...]:
    """Return the shorter lengths to profile: half and a quarter of `length`; empty if it is below 8 or unknown."""
    return () if length is None or length < 8 else (length // 2, length // 4)


def read_samples(job: Job, settings: Settings, *, samples: int) -> StepInput:
    """Return the first batch of the job, as one microbatch with this number of samples."""
    partition = BatchPartition(global_batch_size=samples, micro_batch_size=samples)
    return read_first(JobData(job, settings), settings, partition=partition)[0]


def make_profiling_plan(settings: Settings, layout: str, ranks: int, *, samples: int) -> ExecutionPlan:
    """Return the execution plan of a step of one microbatch with this number of samples."""
    return make_execution_plan(
        layout=parse_layout(layout),
        update=parse_update("sync"),
        resources=Resources(ranks=ranks),
        facts=JobFacts(global_batch_size=samples, micro_batch_size=samples, backend=settings.train.backend),
    )


def shorten_batch(batch: Any, full_length: int | None, length: int) -> Any:
    """Return the batch. Each tensor whose second dimension is `full_length` is cut to `length` positions."""

    def shorten(tensor: Tensor) -> Tensor:
        return (
            tensor.narrow(1, 0, length).contiguous() if tensor.dim() > 1 and tensor.shape[1] == full_length else tensor
        )

    return map_tensors(batch, shorten)


def fit_batch_scaling(values: Sequence[float], length: int | None) -> BatchScaling:
    """Return a cost as a function of samples and length, fitted to measured values.

    `values` are the cost of few samples, of more samples, and of few samples of half and of a quarter of the length.
    The function has no term for a cost that all samples share and that grows with the length. For such a cost, the
    function is exact at this length only.
    """
    per_sample = (values[1] - values[0]) / (MORE_SAMPLES - FEW_SAMPLES)
    fixed = values[0] - FEW_SAMPLES * per_sample
    if abs(fixed) < _MIN_RELATIVE_SIZE * abs(values[0]):
        per_sample, fixed = values[0] / FEW_SAMPLES, 0.0
    if per_sample < 0 or fixed < 0:  # a negative term would forecast less than was measured
        per_sample, fixed = (
            max(value / count for value, count in zip(values, (FEW_SAMPLES, MORE_SAMPLES), strict=False)),
            0.0,
        )
    if length is None or len(values) < 4:
        return (
            BatchScaling(fixed=fixed, token=per_sample / length)
            if length
            else BatchScaling(fixed=fixed, sample=per_sample)
        )
    half, quarter = ((value - fixed) / FEW_SAMPLES for value in values[2:4])
    half_length, quarter_length = length // 2, length // 4
    upper_slope, lower_slope = (
        (per_sample - half) / (length - half_length),
        (half - quarter) / (half_length - quarter_length),
    )
    pair = (upper_slope - lower_slope) / (length - quarter_length)
    token = upper_slope - pair * (length + half_length)
    if abs(pair) * length * length < _MIN_RELATIVE_SIZE * abs(per_sample):
        pair, token = 0.0, upper_slope
    sample = per_sample - length * (token + length * pair)
    if abs(sample) < _MIN_RELATIVE_SIZE * abs(per_sample):
        sample = 0.0
    if min(half, quarter, pair, sample + token + pair) < 0:
        return BatchScaling(fixed=fixed, token=per_sample / length)
    return BatchScaling(fixed=fixed, sample=sample, token=token, pair=pair)
