"""Preparation of a job for profiling: its model is built once, and the largest sample comes first."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from paceline.config.settings import Settings
from paceline.data.dataset_properties import find_length
from paceline.data.fetch import Fetcher, MicrobatchRequest, WorkerError
from paceline.data.reader_process import read_apart
from paceline.data.source import Source
from paceline.errors import UsageError
from paceline.job import Job
from paceline.measured_planning.profile.truncated_model import built_once
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.parallel.initialization.pretrained import PretrainedModel
from paceline.planner.search.search_space import SearchSpace
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.torch_internals.pytree import tensor_leaves
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.setup.job_data import JobData
from paceline.trainer.setup.prepare import PreparedJob

_LOOKED = 32  # samples whose sizes are read
_MOST = 1 << 20  # indices of an epoch; no epoch is read completely
_NORMS = (
    "BatchNorm: the samples of a microbatch interact, so a different microbatch size changes the training; "
    "--train.micro_batch_size keeps it"
)


def forecast_job(ready: PreparedJob) -> tuple[PreparedJob, tuple[str, ...]]:
    """Return the job prepared for profiling, and notes to print."""
    job, note = largest_first(ready.job, ready.settings)
    found = replace(ready, job=built_once(job, seed=ready.settings.seed))
    notes = [note] if note else []
    if ready.settings.train.micro_batch_size is None and not isinstance(found.job.model, PretrainedModel):
        with FakeExecutionMode() as hollow:
            hollow.holds = False
            notes += [_NORMS] if norms_with_statistics(found.job.model()) else []
    return found, tuple(notes)


def grid_of(settings: Settings, *, asked: str) -> SearchSpace:
    """Return the search space of layouts: with the requested microbatch size, or any.

    Raises:
        UsageError: the settings exclude the choice that `command` makes.
    """
    if settings.train.gradient_accumulation_steps is not None:
        raise UsageError(
            f"{asked} with train.gradient_accumulation_steps: each layout would have different microbatches.",
            cause=f"{asked.split()[-1]} also chooses how a batch is split",
            hint="leave it out, or set --train.micro_batch_size",
        )
    return SearchSpace(micro_batch_size=settings.train.micro_batch_size)


def largest_first(job: Job, settings: Settings) -> tuple[Job, str]:
    """Return the job with the largest of a few examined samples in place of every sample, and a note to print.

    Streams do not change. A sample that can't be read is reported when it is read next.
    """
    source = JobData(job, settings).train
    if not source.is_indexed:
        return job, ""
    sizes = read_apart(source, partial(_sizes, source, settings.seed), seed=settings.seed)
    if not sizes:
        return job, ""
    few = len(sizes)
    least, most = min(sizes.values()), max(sizes.values())
    if least == most:
        return job, ""
    place = max(sizes, key=lambda each: sizes[each])
    note = f"samples have {least:,} to {most:,} numbers (of {few} examined): the plan is for the largest"
    return replace(job, order=partial(_only, place)), note


def _sizes(source: Source, seed: int) -> dict[int, int]:
    """Return the element counts of some samples by index; empty if one can't be read."""
    total = find_length(source.data, name="train_data")
    last, few = total - 1, min(_LOOKED, total)
    fetcher = Fetcher(data=source.data, collate=source.collate, seed=seed, seed_samples=False)
    with preserve_rng():
        looked = {n * last // max(1, few - 1): None for n in range(few)}
        batches = {place: fetcher[MicrobatchRequest(epoch=0, indices=(place,))] for place in looked}
    if any(isinstance(batch, WorkerError) for batch in batches.values()):
        return {}
    return {place: sum(tensor.numel() for tensor in tensor_leaves(batch)) for place, batch in batches.items()}


def _only(place: int, num_samples: int, epoch: int, seed: int) -> Sequence[int]:
    return [place] * min(num_samples, _MOST)
