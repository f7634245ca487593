"""Sample batches for profiling a model, and the scaling from them to any other batch."""

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

FEW, MORE = 2, 3  # a single sample may take another path through the model
_SMALLEST = 1e-3  # relative size below which a term is rounding
_TOKENS = "input_ids"


def length_of(job: Job, settings: Settings) -> int | None:
    batch = samples_of(job, settings, samples=1).micro[0].data
    if job.sequence is not None:
        found = [(batch[n] if isinstance(batch, dict) else batch[int(n)]).shape[d] for n, d in job.sequence.items()]
        return int(found[0])
    ids = batch.get(_TOKENS) if isinstance(batch, dict) else None
    return int(ids.shape[1]) if isinstance(ids, Tensor) and ids.dim() > 1 else None


def lengths_of(length: int | None) -> tuple[int, ...]:
    return () if length is None or length < 8 else (length // 2, length // 4)


def samples_of(job: Job, settings: Settings, *, samples: int) -> StepInput:
    cut = BatchPartition(global_batch_size=samples, micro_batch_size=samples)
    return read_first(JobData(job, settings), settings, cut=cut)[0]


def plan_of(settings: Settings, layout: str, ranks: int, *, samples: int) -> ExecutionPlan:
    return make_execution_plan(
        layout=parse_layout(layout),
        update=parse_update("sync"),
        cluster=Resources(ranks=ranks),
        facts=JobFacts(global_batch_size=samples, micro_batch_size=samples, backend=settings.train.backend),
    )


def shorten_batch(batch: Any, whole: int | None, length: int) -> Any:
    """Return the first positions of every tensor that is as long as the sequence."""

    def shorter(tensor: Tensor) -> Tensor:
        return tensor.narrow(1, 0, length).contiguous() if tensor.dim() > 1 and tensor.shape[1] == whole else tensor

    return map_tensors(batch, shorter)


def amount_through(values: Sequence[float], length: int | None) -> BatchScaling:
    """Fit a scaling to the counts for few samples, more samples and shorter samples; each adds a term.

    A cost that all samples share and that grows with their length does not have this form; the fit is exact at this
    length only.
    """
    each = (values[1] - values[0]) / (MORE - FEW)
    fixed = values[0] - FEW * each
    if abs(fixed) < _SMALLEST * abs(values[0]):
        each, fixed = values[0] / FEW, 0.0
    if each < 0 or fixed < 0:  # a negative term would forecast less than was measured
        each, fixed = max(value / count for value, count in zip(values, (FEW, MORE), strict=False)), 0.0
    if length is None or len(values) < 4:
        return BatchScaling(fixed=fixed, token=each / length) if length else BatchScaling(fixed=fixed, sample=each)
    half, quarter = ((value - fixed) / FEW for value in values[2:4])
    long, short = length // 2, length // 4
    first, second = (each - half) / (length - long), (half - quarter) / (long - short)
    pair = (first - second) / (length - short)
    token = first - pair * (length + long)
    if abs(pair) * length * length < _SMALLEST * abs(each):
        pair, token = 0.0, first
    sample = each - length * (token + length * pair)
    if abs(sample) < _SMALLEST * abs(each):
        sample = 0.0
    if min(half, quarter, pair, sample + token + pair) < 0:
        return BatchScaling(fixed=fixed, token=each / length)
    return BatchScaling(fixed=fixed, sample=sample, token=token, pair=pair)
