"""Profile a job with its largest sample as every sample, so that a plan holds for samples of different sizes."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from paceline.config.settings import Settings
from paceline.data.dataset_properties import read_length
from paceline.data.fetch import Fetcher, MicrobatchRequest, WorkerError
from paceline.data.reader_process import read_in_process
from paceline.data.source import Source
from paceline.job import Job
from paceline.torch_internals.pytree import tensor_leaves
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.setup.job_data import JobData

_MAX_EXAMINED = 32  # samples whose sizes are read
_MAX_INDICES = 1 << 20  # of an epoch in profiling, which reads far fewer samples


def use_largest_sample(job: Job, settings: Settings) -> tuple[Job, str]:
    """Return the job with every sample replaced by the largest of up to 32 examined samples, and a note to print.

    Return the job itself if its samples have equal sizes, are a stream without indices, or can't be read. Profiling
    then reads them and reports the error.
    """
    source = JobData(job, settings).train
    if not source.is_indexed:
        return job, ""
    sizes = read_in_process(source, partial(_sample_sizes, source, settings.seed), seed=settings.seed)
    if not sizes:
        return job, ""
    num_examined = len(sizes)
    smallest, largest = min(sizes.values()), max(sizes.values())
    if smallest == largest:
        return job, ""
    index = max(sizes, key=sizes.__getitem__)
    note = f"samples have {smallest:,} to {largest:,} numbers (of {num_examined} examined): the plan is for the largest"
    return replace(job, order=partial(_repeat_index, index)), note


def _sample_sizes(source: Source, seed: int) -> dict[int, int]:
    """Return the numbers of elements of some samples by index; empty if one of them can't be read."""
    total = read_length(source.data, name="train_data")
    last, num_examined = total - 1, min(_MAX_EXAMINED, total)
    fetcher = Fetcher(data=source.data, collate=source.collate, seed=seed, seed_samples=False)
    with preserve_rng():
        indices = {n * last // max(1, num_examined - 1): None for n in range(num_examined)}
        batches = {index: fetcher[MicrobatchRequest(epoch=0, indices=(index,))] for index in indices}
    if any(isinstance(batch, WorkerError) for batch in batches.values()):
        return {}
    return {index: sum(tensor.numel() for tensor in tensor_leaves(batch)) for index, batch in batches.items()}


def _repeat_index(index: int, num_samples: int, epoch: int, seed: int) -> Sequence[int]:
    return [index] * min(num_samples, _MAX_INDICES)
