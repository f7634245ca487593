"""Read sample batches for profiling a model, with different numbers and lengths of samples."""

from typing import Any

from torch import Tensor

from paceline.config.layout import parse_layout
from paceline.config.settings import Settings
from paceline.config.update_rule import parse_update
from paceline.data.types import BatchPartition, StepInput
from paceline.job import Job
from paceline.planner.layout.execution_plan import ExecutionPlan, JobFacts, Resources, make_execution_plan
from paceline.torch_internals.pytree import map_tensors
from paceline.trainer.setup.job_data import JobData, read_first

FEW_SAMPLES, MORE_SAMPLES = 2, 3  # not 1: a model may have other code for a single sample
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
