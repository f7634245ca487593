"""The data of a job, as the sources and loaders that a run reads from."""

from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from paceline.comm.process_group import World
from paceline.config.settings import Settings
from paceline.data.dataset_properties import (
    DatasetProperties,
    find_properties,
    is_repeatable_read,
    property_samples,
    refuse_different_data,
)
from paceline.data.loader import BatchLoader, make_loader
from paceline.data.order.cursor import Cursor
from paceline.data.reader_process import read_in_process
from paceline.data.source import DatasetCache, Source, read_source
from paceline.data.types import BatchPartition, StepInput
from paceline.job import Job
from paceline.planner.layout.execution_plan import ExecutionPlan
from paceline.torch_internals.rng import preserve_rng


class JobData:
    """The data of a job in one process. An indexed dataset that a function returns is created only once.

    If one split has data workers, all splits have data workers. Otherwise the workers of one split would share open
    files with this process, which would read the other split itself.
    """

    def __init__(self, job: Job, settings: Settings) -> None:
        self._job = job
        self._created_datasets = DatasetCache()
        self._requested_workers = settings.data.workers
        splits = (job.train_data, job.eval_data, job.test_data)
        self._min_workers = int(any(isinstance(split, DataLoader) and split.num_workers for split in splits))

    @property
    def workers(self) -> int:
        """The minimum number of data workers of each split; 0 if no process is forked."""
        return self._requested_workers or self._min_workers

    @cached_property
    def train(self) -> Source:
        """The training data."""
        return self._source(self._job.train_data, order=self._job.order, name="train_data")

    def split(self, data: Any, *, name: str) -> Source:
        """Return a source to evaluate on, from a split of the job or any other data."""
        return self._source(data, order=None, name=name)

    def _source(self, data: Any, *, order: Any, name: str) -> Source:
        collate, created_datasets = self._job.collate, self._created_datasets
        source = read_source(
            data, collate=collate, order=order, workers=self._requested_workers, name=name, cache=created_datasets
        )
        return source if source.workers else replace(source, workers=self._min_workers)


def build_loader(
    data: JobData, settings: Settings, *, partition: BatchPartition, cursor: Cursor | None = None, **loader_options: Any
) -> BatchLoader:
    """Return a loader that starts at the beginning, or at `cursor`. `loader_options` are passed to `make_loader`."""
    return make_loader(
        data=data.train,
        collate=None,
        order=None,
        seed=settings.seed,
        partition=partition,
        cursor=cursor or Cursor(),
        **loader_options,
    )


def read_first(
    data: JobData, settings: Settings, *, partition: BatchPartition, count: int = 1, **loader_options: Any
) -> list[StepInput]:
    """Read a replica's part of the first `count` batches, before the run has a loader.

    If the data has workers, another process reads it.
    """
    source = data.train

    def read() -> list[StepInput]:
        loader = make_loader(
            data=replace(source, workers=0),
            collate=None,
            order=None,
            seed=settings.seed,
            partition=partition,
            cursor=Cursor(),
            **loader_options,
        )
        with preserve_rng():
            step_batches = list(islice(loader, count))
            loader.close()
        return (
            [replace(step_batch, read_stand_in=None) for step_batch in step_batches] if source.workers else step_batches
        )

    step_batches = read_in_process(source, read, seed=settings.seed)
    if not source.workers:
        return step_batches
    # A replica without a microbatch of its own runs the batch's first one as a stand-in.
    full_partition = replace(partition, replica=0, replicas=1)
    return [
        replace(step_batch, read_stand_in=lambda: read_first(data, settings, partition=full_partition)[0].micro[0].data)
        for step_batch in step_batches
    ]


def build_partition(
    plan: ExecutionPlan, settings: Settings, data: World, *, reads_samples: bool = True
) -> BatchPartition:
    """Return the part of each global batch that this replica reads; `data` is the world of the replicas."""
    return BatchPartition(
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        replica=data.rank,
        replicas=data.world_size,
        drop_last=settings.data.drop_last,
        reads_samples=reads_samples,
    )


def read_data_properties(source: Source, world: World, *, seed: int) -> DatasetProperties | None:
    """Return the properties of indexed data, or None for a stream. Refuse data that differs between ranks."""
    if not source.is_indexed:
        return None
    properties = find_properties(source, seed=seed)
    properties.raise_error()
    by_rank = world.gather_json([properties.num_samples, properties.fingerprint])
    samples = property_samples(properties.num_samples)

    def is_repeatable() -> bool:
        return all(world.gather_json(is_repeatable_read(source, samples=samples, epoch=0, seed=seed)))

    lengths, checksums = dict(enumerate(each[0] for each in by_rank)), dict(enumerate(each[1] for each in by_rank))
    refuse_different_data(lengths, checksums, samples=samples, name="train_data", is_repeatable=is_repeatable)
    return properties
