"""The data of a job as a run reads it."""

from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader

from paceline.comm.process_group import World
from paceline.config.settings import Settings
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

    If one split has data workers, all splits have them: otherwise the workers of one split would share open files with
    this process, which reads the other split.
    """

    def __init__(self, job: Job, settings: Settings) -> None:
        self._job = job
        self._made = DatasetCache()
        self._asked = settings.data.workers
        splits = (job.train_data, job.eval_data, job.test_data)
        self._least = int(any(isinstance(split, DataLoader) and split.num_workers for split in splits))

    @property
    def workers(self) -> int:
        """The minimum number of data workers of each split; 0 if no process is forked."""
        return self._asked or self._least

    @cached_property
    def train(self) -> Source:
        """The training data."""
        return self._source(self._job.train_data, order=self._job.order, name="train_data")

    def split(self, data: Any, *, name: str) -> Source:
        """Return a source to evaluate on, from a split of the job or any other data."""
        return self._source(data, order=None, name=name)

    def _source(self, data: Any, *, order: Any, name: str) -> Source:
        collate, made = self._job.collate, self._made
        source = read_source(data, collate=collate, order=order, workers=self._asked, name=name, cache=made)
        return source if source.workers else replace(source, workers=self._least)


def feed_for(
    data: JobData, settings: Settings, *, cut: BatchPartition, cursor: Cursor | None = None, **how: Any
) -> BatchLoader:
    """Return a loader that starts at the beginning, or at `cursor`. `loader_options` are passed to `make_loader`."""
    return make_loader(
        data=data.train,
        collate=None,
        order=None,
        seed=settings.seed,
        partition=cut,
        cursor=cursor or Cursor(),
        **how,
    )


def read_first(
    data: JobData, settings: Settings, *, cut: BatchPartition, count: int = 1, **how: Any
) -> list[StepInput]:
    """Read a replica's share of the first batches, in a process that may read data, before the run has a loader."""
    source = data.train

    def read() -> list[StepInput]:
        feed = make_loader(
            data=replace(source, workers=0),
            collate=None,
            order=None,
            seed=settings.seed,
            partition=cut,
            cursor=Cursor(),
            **how,
        )
        with preserve_rng():
            found = list(islice(feed, count))
            feed.close()
        return [replace(given, read_stand_in=None) for given in found] if source.workers else found

    found = read_in_process(source, read, seed=settings.seed)
    if not source.workers:
        return found
    whole = replace(cut, replica=0, replicas=1)
    return [
        replace(given, read_stand_in=lambda: read_first(data, settings, cut=whole)[0].micro[0].data) for given in found
    ]


def cut_for(plan: ExecutionPlan, settings: Settings, data: World, *, reads: bool = True) -> BatchPartition:
    """Return the part of each global batch that this replica reads; `data` is the world of replicas."""
    return BatchPartition(
        global_batch_size=plan.global_batch_size,
        micro_batch_size=plan.micro_batch_size,
        replica=data.rank,
        replicas=data.world_size,
        drop_last=settings.data.drop_last,
        reads_samples=reads,
    )
