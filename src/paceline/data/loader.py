"""The training loader, which yields a replica's microbatches of each global batch, and reading of evaluation data."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from paceline.console.formatting import plural
from paceline.data.dataset_properties import (
    DatasetProperties,
    find_properties,
    is_repeatable_read,
    property_samples,
    read_length,
    refuse_different_data,
)
from paceline.data.fetch import Fetcher, MicrobatchRequest, SampleCheckRequest, checksum_of_samples, raise_worker_error
from paceline.data.order.batches import Batch
from paceline.data.order.cursor import Cursor
from paceline.data.order.microbatch_assignment import assign_microbatches
from paceline.data.order_check import refuse_changed_order, refuse_different_orders
from paceline.data.reader_process import read_in_process
from paceline.data.source import Collate, SampleOrder, Source, read_source, refuse_no_batch
from paceline.data.stream.epoch import GatherJson
from paceline.data.stream.iterable_loader import IterableLoader
from paceline.data.stream.single_pass import read_stream_once
from paceline.data.types import BatchPartition, DatasetSummary, ReplicaMicrobatch, StepInput
from paceline.data.workers import DataWorkers
from paceline.errors import DataError, JobError
from paceline.torch_internals.rng import stream_key


class BatchLoader(Protocol):
    """A loader of step inputs, from which the training loop reads."""

    @property
    def num_samples(self) -> int | None:
        """The number of samples in an epoch; None for a stream."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The lines that the banner shows about the data."""

    def __iter__(self) -> Iterator[StepInput]: ...

    def state(self) -> Mapping[str, Any]:
        """Return the state that a checkpoint needs in addition to the cursor. Every replica calls this."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by `state`, before iterating."""

    def close(self) -> None:
        """Stop the data workers."""


def make_loader(
    *,
    data: Any,
    collate: Collate | None,
    order: Any,
    seed: int,
    partition: BatchPartition,
    cursor: Cursor,
    workers: int = 0,
    sample_seeds: str = "auto",
    pin_memory: bool = False,
    shards: int | None = None,
    gather_json: GatherJson | None = None,
    properties: DatasetProperties | None = None,
) -> BatchLoader:
    """Return the loader of one replica, starting at `cursor`. `data` may be a `Source` whose `properties` are known.

    `sample_seeds` decides whether each sample of a map-style dataset is read with its own seed: "always", "never" or
    "auto". With "auto", each sample gets its own seed if reading the dataset's first or middle sample draws random
    numbers or fails. `gather_json` gathers a value from every replica. With it, replicas divide the reading of a stream
    between them, and compare their data and a user-defined order at the start of each epoch.
    """
    source = read_source(data, collate=collate, order=order, workers=workers, name="train_data")
    if not source.is_indexed:
        if not partition.reads_samples:
            raise stream_error()
        return IterableLoader(
            source=source,
            partition=partition,
            cursor=cursor,
            seed=seed,
            sample_seeds=sample_seeds,
            shards=shards,
            gather_json=gather_json,
        )
    return MapStyleLoader(
        source=source,
        properties=properties or find_properties(source, seed=seed),
        seed=seed,
        partition=partition,
        cursor=cursor,
        sample_seeds=sample_seeds,
        pin_memory=pin_memory,
        gather_json=gather_json,
    )


class MapStyleLoader:
    """A loader of a map-style dataset. A resume reads no samples before the cursor."""

    def __init__(
        self,
        *,
        source: Source,
        properties: DatasetProperties,
        seed: int,
        partition: BatchPartition,
        cursor: Cursor,
        sample_seeds: str,
        pin_memory: bool,
        gather_json: GatherJson | None = None,
    ) -> None:
        self._source = source
        self._seed = seed
        self._num_samples = properties.num_samples
        self._partition = partition
        self._gather_json = gather_json
        self._order_source = source.order_source
        self._epoch_state: Mapping[str, Any] = {}
        self._cursor = cursor
        self._order = SampleOrder(order=source.order, num_samples=properties.num_samples, seed=seed)
        self.num_samples: int | None = self._order.size(cursor.epoch)
        if partition.drop_last:
            refuse_no_batch(self.num_samples, batch=partition.global_batch_size)
        seeded = sample_seeds == "always" or (sample_seeds == "auto" and properties.draws_random)
        self._fetcher = Fetcher(data=source.data, collate=source.collate, seed=seed, seed_samples=seeded)
        worker_seed = stream_key(seed, "workers", partition.replica, cursor.epoch, cursor.position)
        self._workers = DataWorkers(fetcher=self._fetcher, source=source, pin_memory=pin_memory, seed=worker_seed)
        self.notes = (*source.notes, *self._size_warning())

    def __iter__(self) -> Iterator[StepInput]:
        """Yield step inputs forever, epoch after epoch."""
        fetched = self._workers.start(self._all_requests())
        epoch, summary = None, None
        for batch, requests in self._plan_batches():
            if batch.next_cursor.epoch != epoch:
                epoch = batch.next_cursor.epoch
                request = self._summary_request(epoch)
                summary = raise_worker_error(self._fetcher[request] if fetched is None else next(fetched))
                self._check_epoch(epoch, summary)
            if fetched is not None and not requests:
                next(fetched)
            micro = tuple(
                ReplicaMicrobatch(
                    index=index,
                    num_samples=len(request.indices),
                    data=raise_worker_error(self._fetcher[request] if fetched is None else next(fetched)),
                    indices=request.indices,
                )
                for index, request in requests
            )
            yield StepInput(
                batch=batch, micro=micro, read_stand_in=partial(self._read_stand_in, batch), summary=summary
            )

    def _size_warning(self) -> tuple[str, ...]:
        batch, total = self._partition.global_batch_size, self.num_samples or 0
        if batch <= total:
            return ()
        return (
            f"warning: a global batch of {batch:,} is larger than an epoch: each step takes all "
            f"{plural(total, 'sample')}",
        )

    def _read_stand_in(self, batch: Batch) -> Any:
        """Return a batch's first microbatch, read without the data workers, for a replica that has no microbatch."""
        request = self._request(batch, 0)
        return raise_worker_error(read_in_process(self._source, lambda: self._fetcher[request], seed=self._seed))

    def _summary_request(self, epoch: int) -> MicrobatchRequest:
        """Return the request for a summary of the data at an epoch's start: its length, and samples to compare.

        Every epoch compares another random sample. A parameter server (`reads_samples` is False) also compares the
        samples of `property_samples`, because its workers may join later than the start of the run.
        """
        random_sample = (stream_key(self._seed, "glance", epoch) % self._num_samples,)
        samples = (
            random_sample
            if self._partition.reads_samples
            else tuple({*property_samples(self._num_samples), *random_sample})
        )
        is_compared = self._gather_json is not None or not self._partition.reads_samples
        return MicrobatchRequest(
            epoch=epoch, indices=(), check=SampleCheckRequest(samples=samples if is_compared else ())
        )

    def _all_requests(self) -> Iterator[MicrobatchRequest]:
        """Yield the requests for data workers; an empty request for a batch in which this replica has no microbatch.

        Without empty requests, a replica that never has a microbatch would search for its next microbatch forever.
        """
        epoch: int | None = None
        for batch, requests in self._plan_batches():
            if batch.next_cursor.epoch != epoch:
                epoch = batch.next_cursor.epoch
                yield self._summary_request(epoch)
            yield from [request for _, request in requests] or [MicrobatchRequest(epoch=epoch, indices=())]

    def state(self) -> Mapping[str, Any]:
        """Return the current epoch, and the checksum or name of its order."""
        return dict(self._epoch_state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Store the saved state, whose order is compared when the epoch is resumed."""
        self._epoch_state = state

    def close(self) -> None:
        """Stop the data workers."""
        self._workers.close()

    def _check_epoch(self, epoch: int, summary: DatasetSummary) -> None:
        """Check, before an epoch's first batch, that all replicas have the same data and order.

        Check also that the length of the data is that of the run's start, and that a resumed epoch has its old order.
        Store the checksum of the order for `state`.

        Raises:
            DataError: the data is longer or shorter than when the run began.
            DesyncError: a replica has other data or another order.
            ResumeError: the run has resumed in this epoch, and the order has changed.
        """
        if self._gather_json is not None:
            summaries = self._gather_json([summary.num_samples, summary.checksum])
            lengths, checksums = zip(*summaries, strict=True)
            is_repeatable = partial(self._is_repeatable, summary.samples, epoch)
            refuse_different_data(
                dict(enumerate(lengths)),
                dict(enumerate(checksums)),
                samples=summary.samples,
                name="train_data",
                is_repeatable=is_repeatable,
            )
        if summary.num_samples != self._num_samples:
            raise DataError(
                f"train_data has {summary.num_samples:,} samples in epoch {epoch}, "
                f"but had {self._num_samples:,} at the start.",
                cause="its __len__ changes from call to call, or depends on set_epoch()",
                hint="a fixed length, and order=lambda num_samples, epoch, seed: [...] to choose each epoch's samples",
            )
        checksum, order_source = self._order.checksum_or_name(epoch), self._order_source
        if self._order.is_user_defined and self._gather_json is not None:
            refuse_different_orders(
                self._gather_json(checksum), order_source=order_source, epoch_note=f", in epoch {epoch}"
            )
        if self._epoch_state.get("epoch") == epoch and "order" in self._epoch_state:
            refuse_changed_order(
                checksum,
                saved=str(self._epoch_state["order"]),
                order_source=order_source,
                epoch_note=f", in epoch {epoch}",
            )
        self._epoch_state = {"epoch": epoch, "order": checksum}

    def _is_repeatable(self, samples: Sequence[int], epoch: int) -> bool:
        assert self._gather_json is not None
        return all(self._gather_json(is_repeatable_read(self._source, samples=samples, epoch=epoch, seed=self._seed)))

    def _plan_batches(self) -> Iterator[tuple[Batch, list[tuple[int, MicrobatchRequest]]]]:
        """Yield each batch with this replica's microbatches: their index in the batch, and the request."""
        cursor, partition = self._cursor, self._partition
        while True:
            batch = self._order.next_batch(
                cursor,
                global_batch_size=partition.global_batch_size,
                micro_batch_size=partition.micro_batch_size,
                drop_last=partition.drop_last,
            )
            cursor = batch.next_cursor
            local_indices = (
                assign_microbatches(len(batch.micro), replica=partition.replica, replicas=partition.replicas)
                if partition.reads_samples
                else ()
            )
            yield batch, [(index, self._request(batch, index)) for index in local_indices]

    def _request(self, batch: Batch, index: int) -> MicrobatchRequest:
        micro, epoch = batch.micro[index], batch.next_cursor.epoch
        return MicrobatchRequest(
            epoch=epoch, indices=self._order.indices_at(epoch=epoch, start=micro.start, stop=micro.stop)
        )


def stream_error() -> JobError:
    """Return the error for a stream under an update rule that assigns samples by index."""
    return JobError(
        "train_data is a stream, but --update ps assigns samples by their index, so that another worker can read the "
        "samples of a lost worker.",
        cause="train_data is an iterable dataset: only the worker that has read a sample has it",
        hint="a dataset with __len__ and __getitem__, or --update sync",
    )


def read_eval_microbatches(
    *,
    data: Any,
    collate: Collate | None,
    batch_size: int,
    replica: int,
    replicas: int,
    seed: int,
    workers: int = 0,
    name: str = "eval_data",
    totals: dict[str, list[int]] | None = None,
    gather_json: GatherJson | None = None,
) -> Iterator[ReplicaMicrobatch]:
    """Yield this replica's microbatches of one pass. Each sample is in a microbatch of exactly one replica.

    Replicas may have different numbers of microbatches. For a stream, `totals` receives the sample count and checksum
    of each shard that this replica reads, so that replicas can compare them. With `gather_json`, which gathers a value
    from every replica, a user-defined order is compared first.
    """
    source = read_source(data, collate=collate, order=None, workers=workers, name=name)
    if not source.is_indexed:
        shard_totals = {} if totals is None else totals
        yield from read_stream_once(
            source=source, batch_size=batch_size, replica=replica, replicas=replicas, seed=seed, totals=shard_totals
        )
        return
    num_samples = _equal_length(source, seed=seed, name=name, gather_json=gather_json)
    order = SampleOrder(order=source.order or "sequential", num_samples=num_samples, seed=seed)
    if order.is_user_defined and gather_json is not None:
        refuse_different_orders(
            gather_json(order.checksum_or_name(0)), order_source=f"{source.order_source} of {name}", epoch_note=""
        )
    total = order.size(0)
    starts = list(range(0, total, batch_size))
    fetcher = Fetcher(data=source.data, collate=source.collate, seed=seed, seed_samples=False)
    requests = [
        (
            index,
            MicrobatchRequest(
                epoch=None, indices=order.indices_at(epoch=0, start=starts[index], stop=starts[index] + batch_size)
            ),
        )
        for index in assign_microbatches(len(starts), replica=replica, replicas=replicas)
    ]
    pool = DataWorkers(
        fetcher=fetcher, source=source, pin_memory=False, seed=stream_key(seed, "workers", name, replica)
    )
    fetched = pool.start(request for _, request in requests)
    try:
        for index, request in requests:
            value = raise_worker_error(fetcher[request] if fetched is None else next(fetched))
            yield ReplicaMicrobatch(index=index, num_samples=len(request.indices), data=value, indices=request.indices)
    finally:
        pool.close()


def _equal_length(source: Source, *, seed: int, name: str, gather_json: GatherJson | None) -> int:
    """Return the number of samples. With `gather_json`, replicas first compare this number and the middle sample.

    Raises:
        DesyncError: a replica has other data.
    """

    def read_summary() -> list[int]:
        total = read_length(source.data, name=name)
        return [total, 0 if gather_json is None else checksum_of_samples(source.data, [total // 2], epoch=0, seed=seed)]

    local_summary = read_in_process(source, read_summary, seed=seed)
    if gather_json is not None:
        summaries, samples = gather_json(local_summary), [local_summary[0] // 2]

        def is_repeatable() -> bool:
            return all(gather_json(is_repeatable_read(source, samples=samples, epoch=None, seed=seed)))

        lengths, checksums = zip(*summaries, strict=True)
        refuse_different_data(
            dict(enumerate(lengths)),
            dict(enumerate(checksums)),
            samples=samples,
            name=name,
            is_repeatable=is_repeatable,
        )
    return local_summary[0]
