"""Prepare a job for profiling: build its model once, and use its largest sample as every sample."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from paceline.config.settings import Settings
from paceline.data.dataset_properties import read_length
from paceline.data.fetch import Fetcher, MicrobatchRequest, WorkerError
from paceline.data.reader_process import read_in_process
from paceline.data.source import Source
from paceline.errors import UsageError
from paceline.job import Job
from paceline.measured_planning.profile.truncated_model import build_once
from paceline.parallel.batchnorm.norm_tape import norms_with_statistics
from paceline.parallel.initialization.pretrained import PretrainedModel
from paceline.planner.search.search_space import SearchSpace
from paceline.profiling.model_tracing.fake_execution import FakeExecutionMode
from paceline.torch_internals.pytree import tensor_leaves
from paceline.torch_internals.rng import preserve_rng
from paceline.trainer.setup.job_data import JobData
from paceline.trainer.setup.prepare import PreparedJob

_MAX_EXAMINED = 32  # samples whose sizes are read
_MAX_INDICES = 1 << 20  # of an epoch in profiling, which reads far fewer samples
_BATCHNORM_NOTE = (
    "BatchNorm: the samples of a microbatch interact, so a different microbatch size changes the training; "
    "--train.micro_batch_size fixes the size"
)


def prepare_for_profiling(prepared_job: PreparedJob) -> tuple[PreparedJob, tuple[str, ...]]:
    """Return the job prepared for profiling and replays, and notes to print."""
    job, note = use_largest_sample(prepared_job.job, prepared_job.settings)
    prepared = replace(prepared_job, job=build_once(job, seed=prepared_job.settings.seed))
    notes = [note] if note else []
    if prepared_job.settings.train.micro_batch_size is None and not isinstance(prepared.job.model, PretrainedModel):
        with FakeExecutionMode() as fake_mode:
            fake_mode.comparisons_are_true = False
            notes += [_BATCHNORM_NOTE] if norms_with_statistics(prepared.job.model()) else []
    return prepared, tuple(notes)


def make_search_space(settings: Settings, *, command: str) -> SearchSpace:
    """Return the search space of layouts, with the requested microbatch size or, without one, with any size.

    Raises:
        UsageError: a setting excludes the choice that `command` makes.
    """
    if settings.train.gradient_accumulation_steps is not None:
        raise UsageError(
            f"{command} with train.gradient_accumulation_steps: each layout would have different microbatches.",
            cause=f"{command.split()[-1]} also chooses how a batch is split",
            hint="leave out train.gradient_accumulation_steps, or set --train.micro_batch_size instead",
        )
    return SearchSpace(micro_batch_size=settings.train.micro_batch_size)


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
